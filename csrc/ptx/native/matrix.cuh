// What a warp does with matrices: ldmatrix and stmatrix (sm_90) move 8×8 tiles of 16-bit elements between shared memory
// and fragments, mma.sync multiplies fragments. tile/fragments.cuh has the (lane, value) maps.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/compiler.h"
#include "base/types.h"

namespace ffpa::ptx {

// Lane 8·t + r names the 16-byte aligned address of row r of tile t. Register t of lane l then holds row l/4, columns
// 2·(l%4) and 2·(l%4) + 1 of tile t; with `_trans`, column l/4 and rows 2·(l%4), 2·(l%4) + 1.

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

#define FFPA_MMA_F32(type)                                                       \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type            \
               ".f32 "                                                           \
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// mma.sync, "Warp Level Matrix Multiply-Accumulate Instructions: mma". m16n8k16 has the deepest k for 16-bit inputs, so
// it takes the fewest instructions. A is row-major and B column-major, the only choice of the shape. D and C are the
// same registers. Plain `asm volatile` keeps the written order, which a kernel's software pipeline relies on.
//
// d[4] f32: rows g and g + 8 (values 0-1, 2-3), columns 2·t, 2·t + 1, with g = lane / 4, t = lane % 4.
// a[4] pairs: (row g, k 2t), (row g + 8, k 2t), (row g, k 2t + 8), (row g + 8, k 2t + 8).
// b0, b1 pairs: (k 2t, column g), (k 2t + 8, column g).
template <class Element>
FFPA_DEVICE void mma_m16n8k16_f32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Element, Half>) {
    FFPA_MMA_F32("f16");
  } else {
    static_assert(std::is_same_v<Element, BFloat16>);
    FFPA_MMA_F32("bf16");
  }
}
#undef FFPA_MMA_F32

// Inputs and accumulators are f16; d[2] pairs: (row g, columns 2t, 2t + 1), (row g + 8, the same columns).
FFPA_DEVICE void mma_m16n8k16_f16(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 "
      "{%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace ffpa::ptx
