// ldmatrix and stmatrix (sm_90): a warp moves 8×8 tiles of 16-bit elements between shared memory and fragments.
//
// Lane 8·t + r names the 16-byte aligned address of row r of tile t. Register t of lane l then holds row l/4, columns
// 2·(l%4) and 2·(l%4) + 1 of tile t; with `_trans`, column l/4 and rows 2·(l%4), 2·(l%4) + 1.
#pragma once

#include <cstdint>

#include "base/compiler.h"

namespace ffpa::ptx {

// ldmatrix, "Warp Level Matrix Load Instruction: ldmatrix". Only the shape `.m8n8.b16` is on all targets from sm_80.
FFPA_DEVICE void ldmatrix_x4(uint32_t (&tile)[4], uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tile[0]), "=r"(tile[1]), "=r"(tile[2]), "=r"(tile[3])
               : "r"(row_smem)
               : "memory");
}

FFPA_DEVICE void ldmatrix_x4_trans(uint32_t (&tile)[4], uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tile[0]), "=r"(tile[1]), "=r"(tile[2]), "=r"(tile[3])
               : "r"(row_smem)
               : "memory");
}

// stmatrix, "Warp Level Matrix Store Instruction: stmatrix". It needs sm_90.
FFPA_DEVICE void stmatrix_x4(uint32_t row_smem, const uint32_t (&tile)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_smem), "r"(tile[0]),
               "r"(tile[1]), "r"(tile[2]), "r"(tile[3])
               : "memory");
}

}  // namespace ffpa::ptx
