// Cases for the other functions of ptx/native/threads.cuh: special registers, barriers of a block, the order of
// kernels.
#pragma once

#include "cases/case.h"
#include "ptx/instructions.cuh"

namespace ffpa::cases {

inline constexpr int kGridThreads = 64;

// The grid has 3 × 2 × 2 blocks of 64 threads; each thread writes who it thinks it is.
FFPA_KERNEL(kGridThreads, 1) void special_registers_kernel(const uint32_t*, uint32_t* output) {
  const int block = (ptx::block_z() * ptx::grid_y() + ptx::block_y()) * ptx::grid_x() + ptx::block_x();
  uint32_t* mine = output + (block * kGridThreads + ptx::thread_x()) * 9;
  const int values[9] = {ptx::thread_x(), ptx::block_x(), ptx::block_y(),
                         ptx::block_z(),  ptx::grid_x(),  ptx::grid_y(),
                         ptx::grid_z(),   ptx::lane_id(), int(ptx::dynamic_smem() % 1024)};
  for (int i = 0; i < 9; ++i) ptx::st_global_4(mine + i, uint32_t(values[i]));
}

// Every thread stores a word, and after the barrier reads the word of the thread 33 further on.
FFPA_KERNEL(128, 1) void sync_block_kernel(const uint32_t* input, uint32_t* output) {
  const int thread = ptx::thread_x_anew();
  const uint32_t smem = ptx::dynamic_smem();
  ptx::st_shared_4(smem + thread * 4, ptx::ld_global_4(input + thread));
  ptx::sync_block();
  ptx::st_global_4(output + thread, ptx::ld_shared_4(smem + (thread + 33) % 128 * 4));
}

// Warp 0 hands 20 buffers to warp 1 through barriers 1 ("full") and 2 ("empty"); warp 2 takes no part in it.
FFPA_KERNEL(96, 1) void named_barrier_kernel(const uint32_t* input, uint32_t* output) {
  constexpr int kFull = 1, kEmpty = 2, kRounds = 20, kPair = 64;
  const int warp = ptx::thread_x() / 32;
  const int lane = ptx::lane_id();
  const uint32_t smem = ptx::dynamic_smem();
  if (warp == 0) {
    for (int round = 0; round < kRounds; ++round) {
      if (round > 0) ptx::bar_sync(kEmpty, kPair);
      ptx::st_shared_4(smem + lane * 4, ptx::ld_global_4(input + lane) + round);
      ptx::bar_arrive(kFull, kPair);
    }
  } else if (warp == 1) {
    uint32_t sum = 0;
    for (int round = 0; round < kRounds; ++round) {
      ptx::bar_sync(kFull, kPair);
      sum += ptx::ld_shared_4(smem + (31 - lane) * 4);
      if (round + 1 < kRounds) ptx::bar_arrive(kEmpty, kPair);
    }
    ptx::st_global_4(output + lane, sum);
  }
}

// A kernel that nothing comes before, or after, goes on at once.
FFPA_KERNEL(32, 1) void kernel_order_kernel(const uint32_t* input, uint32_t* output) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  ptx::st_global_4(output + ptx::lane_id(), ptx::ld_global_4(input + ptx::lane_id()));
}

inline std::vector<Case> special_register_cases() {
  return {
      {"special_registers", 80, Input::kBits, 1, 3 * 2 * 2 * kGridThreads * 9, 0,
       run_kernel<special_registers_kernel, kGridThreads, 1024, 3, 2, 2>},
      {"wait_for_earlier_kernels", 80, Input::kBits, 32, 32, 0, run_kernel<kernel_order_kernel, 32, 0>},
      {"sync_block", 80, Input::kBits, 128, 128, 0, run_kernel<sync_block_kernel, 128, 512>},
      {"bar_sync", 80, Input::kBits, 32, 32, 0, run_kernel<named_barrier_kernel, 96, 128>},
  };
}

}  // namespace ffpa::cases
