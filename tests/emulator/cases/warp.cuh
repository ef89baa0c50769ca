// Cases for what warps do in ptx/native/threads.cuh.
#pragma once

#include "cases/case.h"
#include "ptx/instructions.cuh"

namespace ffpa::cases {

// Shuffles over five distances; shfl_idx takes source lanes that differ from lane to lane.
template <int kKind>
FFPA_KERNEL(32, 1)
void shuffle_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  const float value = float_from_bits(ptx::ld_global_4(input + lane));
  for (int i = 0; i < 5; ++i) {
    const int distance = 1 << i;
    float result = 0;
    if (kKind == 0) result = ptx::shfl_xor(value, distance);
    if (kKind == 1) result = ptx::shfl_idx(value, lane * 7 + distance);
    ptx::st_global_4(output + lane * 5 + i, float_bits(result));
  }
}

FFPA_KERNEL(32, 1) void vote_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  const uint32_t value = ptx::ld_global_4(input + lane);
  ptx::st_global_4(output + lane * 4, ptx::vote_ballot(value % 2));
  ptx::st_global_4(output + lane * 4 + 1, ptx::vote_any(value == ptx::ld_global_4(input + 5)));
  ptx::st_global_4(output + lane * 4 + 2, ptx::vote_all(lane < 32));
  ptx::st_global_4(output + lane * 4 + 3, ptx::vote_all(lane != 9) + 2 * ptx::vote_any(lane > 31));
}

// Finds the highest bit among 32 bits, among fewer and fewer of them, and among none.
FFPA_KERNEL(32, 1) void bfind_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  const uint32_t bits = ptx::ld_global_4(input + lane);
  ptx::st_global_4(output + lane * 3, uint32_t(ptx::bfind(bits)));
  ptx::st_global_4(output + lane * 3 + 1, uint32_t(ptx::bfind(bits >> lane)));
  ptx::st_global_4(output + lane * 3 + 2, uint32_t(ptx::bfind(bits & 0)));
}

inline std::vector<Case> warp_cases() {
  return {
      warp_case<shuffle_kernel<0>>("shfl_xor", Input::kBits, 1, 5),
      warp_case<shuffle_kernel<1>>("shfl_idx", Input::kBits, 1, 5),
      warp_case<vote_kernel>("vote_ballot", Input::kBits, 1, 4),
      warp_case<bfind_kernel>("bfind", Input::kBits, 1, 3),
  };
}

}  // namespace ffpa::cases
