// Emulated side of ptx/ldmatrix.cuh.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/matrix_ops.h"

namespace ffpa::ptx {

inline void ldmatrix_x1(uint32_t (&tile)[1], uint32_t row_smem, emu::CallSite site = emu::CallSite()) {
  emu::ldmatrix(tile, 1, false, row_smem, site);
}

inline void ldmatrix_x1_trans(uint32_t (&tile)[1], uint32_t row_smem, emu::CallSite site = emu::CallSite()) {
  emu::ldmatrix(tile, 1, true, row_smem, site);
}

inline void ldmatrix_x2(uint32_t (&tile)[2], uint32_t row_smem, emu::CallSite site = emu::CallSite()) {
  emu::ldmatrix(tile, 2, false, row_smem, site);
}

inline void ldmatrix_x2_trans(uint32_t (&tile)[2], uint32_t row_smem, emu::CallSite site = emu::CallSite()) {
  emu::ldmatrix(tile, 2, true, row_smem, site);
}

inline void ldmatrix_x4(uint32_t (&tile)[4], uint32_t row_smem, emu::CallSite site = emu::CallSite()) {
  emu::ldmatrix(tile, 4, false, row_smem, site);
}

inline void ldmatrix_x4_trans(uint32_t (&tile)[4], uint32_t row_smem, emu::CallSite site = emu::CallSite()) {
  emu::ldmatrix(tile, 4, true, row_smem, site);
}

inline void stmatrix_x1(uint32_t row_smem, const uint32_t (&tile)[1], emu::CallSite site = emu::CallSite()) {
  emu::stmatrix(row_smem, tile, 1, false, site);
}

inline void stmatrix_x1_trans(uint32_t row_smem, const uint32_t (&tile)[1], emu::CallSite site = emu::CallSite()) {
  emu::stmatrix(row_smem, tile, 1, true, site);
}

inline void stmatrix_x2(uint32_t row_smem, const uint32_t (&tile)[2], emu::CallSite site = emu::CallSite()) {
  emu::stmatrix(row_smem, tile, 2, false, site);
}

inline void stmatrix_x2_trans(uint32_t row_smem, const uint32_t (&tile)[2], emu::CallSite site = emu::CallSite()) {
  emu::stmatrix(row_smem, tile, 2, true, site);
}

inline void stmatrix_x4(uint32_t row_smem, const uint32_t (&tile)[4], emu::CallSite site = emu::CallSite()) {
  emu::stmatrix(row_smem, tile, 4, false, site);
}

inline void stmatrix_x4_trans(uint32_t row_smem, const uint32_t (&tile)[4], emu::CallSite site = emu::CallSite()) {
  emu::stmatrix(row_smem, tile, 4, true, site);
}

}  // namespace ffpa::ptx
