// Cases for the mbarriers of ptx/native/threads.cuh that sm_80 has, and for cp.async that mbarriers track.
#pragma once

#include "cases/case.h"
#include "copy_ring_kernel.cuh"
#include "ptx/instructions.cuh"

namespace ffpa::cases {

// Warp 0 hands 10 buffers to warp 1 through a full and an empty mbarrier; parities wrap five times.
FFPA_KERNEL(64, 1) void mbarrier_kernel(const uint32_t* input, uint32_t* output) {
  constexpr int kRounds = 10;
  const int thread = ptx::thread_x();
  const int lane = ptx::lane_id();
  const uint32_t full = ptx::dynamic_smem();
  const uint32_t empty = full + 8;
  const uint32_t buffer = full + 128;
  if (thread == 0) {
    ptx::mbarrier_init(full, 32);
    ptx::mbarrier_init(empty, 32);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_block();
  uint32_t sum = 0;
  for (int round = 0; round < kRounds; ++round) {
    if (thread < 32) {
      ptx::mbarrier_wait(empty, (round & 1) ^ 1);
      ptx::st_shared_4(buffer + lane * 4, ptx::ld_global_4(input + lane) + round);
      ptx::mbarrier_arrive(full);
    } else {
      ptx::mbarrier_wait(full, round & 1);
      sum += ptx::ld_shared_4(buffer + (31 - lane) * 4);
      ptx::mbarrier_arrive(empty);
    }
  }
  if (thread >= 32) ptx::st_global_4(output + lane, sum);
}

// Warp 0 copies, and waits for its own copies by itself; warp 1 waits for them on the mbarrier, on which it arrives
// too.
FFPA_KERNEL(64, 1) void tracked_and_awaited_kernel(const uint32_t* input, uint32_t* output) {
  const int thread = ptx::thread_x();
  const int lane = ptx::lane_id();
  const uint32_t full = ptx::dynamic_smem();
  const uint32_t buffer = full + 128;
  if (thread == 0) ptx::mbarrier_init(full, 64);
  ptx::sync_block();
  if (thread < 32) {
    ptx::cp_async_16_or_zero(true, buffer + lane * 16, input + lane * 4);
    ptx::cp_async_mbarrier_arrive(full);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    ptx::st_global_4(output + thread, ptx::ld_shared_4(buffer + lane * 16) + 1);
  } else {
    ptx::mbarrier_arrive(full);
    ptx::mbarrier_wait(full, 0);
    ptx::st_global_4(output + thread, ptx::ld_shared_4(buffer + (31 - lane) * 16) + 2);
  }
}

inline constexpr int kRingCaseSteps = 6;

// Runs the same steps through rings of 1 to 4 slots, one output after the other.
template <int kThreads>
LaunchStatus run_copy_rings(const uint32_t* input, uint32_t* output) {
  for (int slots = 1; slots <= tile::kMaxStages; ++slots) {
    const LaunchStatus status = testing::run_copy_ring<kThreads>(input, output, kRingCaseSteps, slots);
    if (!status.ok()) return status;
    output += kRingCaseSteps * kThreads * 4;
  }
  return {};
}

inline std::vector<Case> mbarrier_cases() {
  const auto ring_case = [](const char* name, int threads, LaunchStatus (*run)(const uint32_t*, uint32_t*)) {
    const int step_words = threads * 4;
    return Case{name, 80, Input::kBits, (1 + kRingCaseSteps) * step_words, 4 * kRingCaseSteps * step_words, 0, run};
  };
  return {
      {"mbarrier_wait", 80, Input::kBits, 32, 32, 0, run_kernel<mbarrier_kernel, 64, 512>},
      {"cp_async_mbarrier_arrive/and_wait", 80, Input::kBits, 128, 64, 0,
       run_kernel<tracked_and_awaited_kernel, 64, 640>},
      ring_case("cp_async_mbarrier_arrive/ring_64", 64, run_copy_rings<64>),
      ring_case("cp_async_mbarrier_arrive/ring_256", 256, run_copy_rings<256>),
  };
}

}  // namespace ffpa::cases
