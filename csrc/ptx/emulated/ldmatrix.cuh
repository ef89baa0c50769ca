// Emulated side of ptx/native/ldmatrix.cuh.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/matrix_ops.h"

namespace ffpa::ptx {

inline void ldmatrix_x4(uint32_t (&tile)[4], uint32_t row_smem, emu::CallSite site = emu::CallSite()) {
  emu::ldmatrix(tile, 4, false, row_smem, site);
}

inline void ldmatrix_x4_trans(uint32_t (&tile)[4], uint32_t row_smem, emu::CallSite site = emu::CallSite()) {
  emu::ldmatrix(tile, 4, true, row_smem, site);
}

inline void stmatrix_x4(uint32_t row_smem, const uint32_t (&tile)[4], emu::CallSite site = emu::CallSite()) {
  emu::stmatrix(row_smem, tile, 4, false, site);
}

}  // namespace ffpa::ptx
