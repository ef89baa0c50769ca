// Cases for ptx/native/matrix.cuh.
#pragma once

#include <type_traits>

#include "cases/case.h"
#include "ptx/instructions.cuh"

namespace ffpa::cases {

inline constexpr int kRowPitchBytes = 48;  // rows of tiles need not be adjacent

// Loads rows of 16 bytes, one per lane, into registers.
template <bool kTransposed>
FFPA_KERNEL(32, 1)
void ldmatrix_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  const uint32_t row = ptx::dynamic_smem() + lane * kRowPitchBytes;
  uint32_t value[4];
  ptx::ld_global_16(value, input + lane * 4);
  ptx::st_shared_16(row, value);
  ptx::sync_warp();
  uint32_t tile[4];
  kTransposed ? ptx::ldmatrix_x4_trans(tile, row) : ptx::ldmatrix_x4(tile, row);
  for (int t = 0; t < 4; ++t) ptx::st_global_4(output + lane * 4 + t, tile[t]);
}

inline constexpr int kProducts = 64;  // products per kernel: enough to meet every rounding the models differ in

// `input` is [product][lane][10]: a[4], b[2], four accumulators.
template <class Element, bool kHalfAccumulators>
FFPA_KERNEL(32, 1)
void mma_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  FFPA_NO_UNROLL
  for (int product = 0; product < kProducts; ++product) {
    const uint32_t* in = input + (product * 32 + lane) * 10;
    uint32_t a[4], b[2];
    for (int i = 0; i < 4; ++i) a[i] = ptx::ld_global_4(in + i);
    for (int i = 0; i < 2; ++i) b[i] = ptx::ld_global_4(in + 4 + i);
    if constexpr (kHalfAccumulators) {
      uint32_t d[2] = {ptx::ld_global_4(in + 6), ptx::ld_global_4(in + 7)};
      ptx::mma_m16n8k16_f16(d, a, b[0], b[1]);
      for (int i = 0; i < 2; ++i) ptx::st_global_4(output + (product * 32 + lane) * 2 + i, d[i]);
    } else {
      float d[4];
      for (int i = 0; i < 4; ++i) d[i] = float_from_random(ptx::ld_global_4(in + 6 + i));
      ptx::mma_m16n8k16_f32<Element>(d, a, b[0], b[1]);
      for (int i = 0; i < 4; ++i) ptx::st_global_4(output + (product * 32 + lane) * 4 + i, float_bits(d[i]));
    }
  }
}

inline std::vector<Case> matrix_cases() {
  constexpr int kLdmatrixSmem = 32 * kRowPitchBytes;
  return {
      warp_case<ldmatrix_kernel<false>, kLdmatrixSmem>("ldmatrix_x4", Input::kBits, 4, 4),
      warp_case<ldmatrix_kernel<true>, kLdmatrixSmem>("ldmatrix_x4_trans", Input::kBits, 4, 4),
      warp_case<mma_kernel<Half, false>>("mma_m16n8k16_f32/f16", Input::kHalves, kProducts * 10, kProducts * 4),
      warp_case<mma_kernel<BFloat16, false>>("mma_m16n8k16_f32/bf16", Input::kHalves, kProducts * 10, kProducts * 4),
      warp_case<mma_kernel<Half, true>>("mma_m16n8k16_f16", Input::kHalves, kProducts * 10, kProducts * 2),
  };
}

}  // namespace ffpa::cases
