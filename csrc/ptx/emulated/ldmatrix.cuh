// Emulated side of ptx/native/ldmatrix.cuh.
#pragma once

#include <cstdint>

#include "ptx/emulated/call_site.cuh"

namespace ffpa::ptx {

void ldmatrix_x4(uint32_t (&tile)[4], uint32_t row_smem, CallSite site = CallSite());
void ldmatrix_x4_trans(uint32_t (&tile)[4], uint32_t row_smem, CallSite site = CallSite());

void stmatrix_x4(uint32_t row_smem, const uint32_t (&tile)[4], CallSite site = CallSite());

}  // namespace ffpa::ptx
