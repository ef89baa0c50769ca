// Kernels whose blocks misuse flags in global memory, each in one way.
#pragma once

#include "cases/flags.cuh"
#include "ptx/instructions.cuh"

namespace ffpa::testing {

using cases::FlagOutput;

// Each of two blocks sets its flag when the other has.
FFPA_KERNEL(32, 1) void wait_for_each_other_kernel(const uint32_t*, uint32_t* output) {
  const FlagOutput out{output};
  if (ptx::thread_x() != 0) return;
  if (ptx::block_x() == 0) {
    ptx::wait_global_at_least(out.counter(1), 1);
    ptx::st_release_global_4(out.counter(0), 1);
  } else {
    ptx::wait_global_at_least(out.counter(0), 1);
    ptx::st_release_global_4(out.counter(1), 1);
  }
}

// Block 0 changes the flag, but not to what block 1 waits for.
FFPA_KERNEL(32, 1) void wait_for_too_much_kernel(const uint32_t*, uint32_t* output) {
  const FlagOutput out{output};
  if (ptx::thread_x() != 0) return;
  if (ptx::block_x() == 0) {
    ptx::st_release_global_4(out.counter(0), 1);
  } else {
    ptx::wait_global_at_least(out.counter(0), 2);
  }
}

// Blocks wait for the block before them as if blocks began in the order of their numbers.
FFPA_KERNEL(32, 1) void wait_for_the_block_before_kernel(const uint32_t*, uint32_t* output) {
  const FlagOutput out{output};
  if (ptx::thread_x() != 0) return;
  ptx::wait_global_at_least(out.counter(0), ptx::block_x());
  ptx::red_add_release_global(out.counter(0), 1);
}

// Blocks read the same words; the last block, which overwrites them, waits for one of the readers alone.
template <int kReader>
FFPA_KERNEL(32, 1)
void overwrite_after_one_reader_kernel(const uint32_t*, uint32_t* output) {
  const FlagOutput out{output};
  const int lane = ptx::lane_id(), block = ptx::block_x(), last = ptx::grid_x() - 1;
  if (block < last) {
    ptx::st_global_4(out.part(block) + lane, ptx::ld_global_4(out.words + lane));
    ptx::sync_warp();
    if (lane == 0) ptx::st_release_global_4(out.counter(block), 1);
    return;
  }
  if (lane == 0) ptx::wait_global_at_least(out.counter(kReader), 1);
  ptx::sync_warp();
  ptx::st_global_4(out.words + lane, 7);
}

// This one is right: each warp of block 0 has a flag of its own, and block 1 waits for both.
template <int kWarps>
FFPA_KERNEL(32 * kWarps, 1)
void flag_of_each_warp_kernel(const uint32_t*, uint32_t* output) {
  const FlagOutput out{output};
  const int thread = ptx::thread_x();
  if (ptx::block_x() == 0) {
    ptx::st_global_4(out.part(0) + thread, thread + 1);
    ptx::sync_warp();
    if (thread % 32 == 0) ptx::st_release_global_4(out.counter(thread / 32), 1);
    return;
  }
  for (int warp = 0; thread == 0 && warp < kWarps; ++warp) ptx::wait_global_at_least(out.counter(warp), 1);
  ptx::sync_block();
  ptx::st_global_4(out.part(1) + thread, ptx::ld_global_4(out.part(0) + thread));
}

// What is wrong where block 0 writes a part and block 1 reads it.
enum class FlagBug {
  kNone,
  kSetBeforeTheData,
  kSetWithoutBarrier,
  kNoBarrierAfterWait,
  kNoWait,
  kReadsFlagAsData,
  kNoFenceBefore,
  kReadsAfterRelease,  // block 0 reads what block 1 then overwrites
  kSetByOrdinaryStore,
};

template <FlagBug kBug>
FFPA_KERNEL(64, 1)
void pass_on_kernel(const uint32_t*, uint32_t* output) {
  const FlagOutput out{output};
  const int thread = ptx::thread_x();
  uint32_t* const data = out.part(0) + thread;
  if (ptx::block_x() == 0) {
    if (kBug == FlagBug::kSetBeforeTheData && thread == 0) ptx::st_release_global_4(out.counter(0), 1);
    if (kBug != FlagBug::kReadsAfterRelease) ptx::st_global_4(data, thread + 1);
    if (kBug != FlagBug::kSetWithoutBarrier) ptx::sync_block();
    if (thread == 0 && kBug == FlagBug::kSetByOrdinaryStore) {
      ptx::st_global_4(out.counter(0), 1);
    } else if (thread == 0 && kBug == FlagBug::kNoFenceBefore) {
      ptx::atom_add_global(out.counter(0), 1);
    } else if (thread == 0 && kBug != FlagBug::kSetBeforeTheData) {
      ptx::st_release_global_4(out.counter(0), 1);
    }
    if (kBug == FlagBug::kReadsAfterRelease) ptx::st_global_4(out.part(2) + thread, ptx::ld_global_4(data));
    return;
  }
  if (kBug == FlagBug::kReadsFlagAsData) {
    ptx::st_global_4(out.part(1) + thread, ptx::ld_global_4(out.counter(0)));
    return;
  }
  if (thread == 0 && kBug != FlagBug::kNoWait) {
    ptx::wait_global_at_least(out.counter(0), 1);
  }
  if (kBug != FlagBug::kNoBarrierAfterWait) ptx::sync_block();
  if (kBug == FlagBug::kReadsAfterRelease) {
    ptx::st_global_4(data, 7);
  } else {
    ptx::st_global_4(out.part(1) + thread, ptx::ld_global_4(data));
  }
}

}  // namespace ffpa::testing
