// Cases for the flags and counters of ptx/native/memory.cuh, by which blocks of one launch wait for each other.
#pragma once

#include "cases/case.h"
#include "ptx/instructions.cuh"

namespace ffpa::cases {

inline constexpr int kFlagBlocks = 8, kFlagThreads = 64;
inline constexpr int kFlagWords = kFlagBlocks * kFlagThreads;

// The output of such a case has words, a part of each block, and counters. All are 0 when the kernel begins.
struct FlagOutput {
  uint32_t* words;

  FFPA_DEVICE uint32_t* part(int block) const { return words + kFlagThreads * (1 + block); }
  FFPA_DEVICE uint32_t* counter(int i) const { return part(kFlagBlocks) + i; }
};
inline constexpr int kFlagOutputWords = kFlagThreads + kFlagWords + kFlagBlocks;

template <int kThreads>
FFPA_KERNEL(kThreads, 1)
void clear_kernel(uint32_t* words, int count) {
  for (int i = ptx::thread_x(); i < count; i += kThreads) ptx::st_global_4(words + i, 0);
}

template <CaseKernel kKernel, bool kCooperative, int kBlocks = kFlagBlocks, int kThreads = kFlagThreads>
LaunchStatus run_flags(const uint32_t* input, uint32_t* output) {
  LaunchShape shape;
  const LaunchStatus cleared = launch(shape, nullptr, clear_kernel<32>, output, kFlagOutputWords);
  if (!cleared.ok()) return cleared;
  shape.grid.x = kBlocks;
  shape.threads = kThreads;
  shape.smem_bytes = 4096;
  shape.cooperative = kCooperative;
  return launch(shape, nullptr, kKernel, input, output);
}

// Returns thread 0's value to all threads of the block.
FFPA_DEVICE uint32_t of_first_thread(uint32_t value) {
  const uint32_t place = ptx::dynamic_smem() + 1024;
  if (ptx::thread_x() == 0) ptx::st_shared_4(place, value);
  ptx::sync_block();
  value = ptx::ld_shared_4(place);
  ptx::sync_block();
  return value;
}

// Takes the block's number, from which it follows whom to wait for: those that began before it.
FFPA_DEVICE uint32_t take_number(const FlagOutput& out) {
  return of_first_thread(ptx::thread_x() == 0 ? ptx::atom_add_global(out.counter(0), 1) : 0);
}

// Blocks change the same words one after the other, in an order that shows in the result.
template <int kBlocks>
FFPA_KERNEL(kFlagThreads, 1)
void flag_chain_kernel(const uint32_t* input, uint32_t* output) {
  const FlagOutput out{output};
  const int thread = ptx::thread_x();
  const uint32_t number = take_number(out);
  if (thread == 0) ptx::wait_global_at_least(out.counter(1), number);
  ptx::sync_block();
  const uint32_t own = ptx::ld_global_4(input + number * kFlagThreads + thread);
  ptx::st_global_4(output + thread, ptx::ld_global_4(output + thread) * 3 + own);
  ptx::sync_block();
  if (thread == 0) ptx::red_add_release_global(out.counter(1), 1);
}

// The block that comes last adds up what all have written. With kFence the counter itself orders nothing.
template <int kBlocks, bool kFence, bool kFenceAfter = kFence>
FFPA_KERNEL(kFlagThreads, 1)
void last_block_kernel(const uint32_t* input, uint32_t* output) {
  const FlagOutput out{output};
  const int thread = ptx::thread_x(), block = ptx::block_x();
  ptx::st_global_4(out.part(block) + thread, ptx::ld_global_4(input + block * kFlagThreads + thread) * (block + 1));
  ptx::sync_block();
  uint32_t before = 0;
  if (thread == 0 && kFence) {
    ptx::fence_acq_rel_gpu();
    before = ptx::atom_add_global(out.counter(0), 1);
    if (kFenceAfter) ptx::fence_acq_rel_gpu();
  } else if (thread == 0) {
    before = ptx::atom_add_acq_rel_global(out.counter(0), 1);
  }
  if (of_first_thread(before) + 1 < kBlocks) return;
  uint32_t sum = 0;
  for (int i = 0; i < kBlocks; ++i) sum += ptx::ld_global_4(out.part(i) + thread);
  ptx::st_global_4(output + thread, sum);
}

// All blocks meet, and each then reads what another has written.
template <int kBlocks>
FFPA_KERNEL(kFlagThreads, 1)
void meeting_kernel(const uint32_t* input, uint32_t* output) {
  const FlagOutput out{output};
  const int thread = ptx::thread_x(), block = ptx::block_x();
  ptx::st_global_4(out.part(block) + thread, ptx::ld_global_4(input + block * kFlagThreads + thread));
  ptx::sync_block();
  if (thread == 0) {
    ptx::red_add_release_global(out.counter(0), 1);
    ptx::wait_global_at_least(out.counter(0), kBlocks);
  }
  ptx::sync_block();
  const uint32_t theirs = ptx::ld_global_4(out.part(kBlocks - 1 - block) + thread);
  if (block == 0) ptx::st_global_4(output + thread, theirs);
}

// Each block has a flag, and waits for that of the next block.
template <int kBlocks>
FFPA_KERNEL(kFlagThreads, 1)
void flag_ring_kernel(const uint32_t* input, uint32_t* output) {
  const FlagOutput out{output};
  const int thread = ptx::thread_x(), block = ptx::block_x(), next = (block + 1) % kBlocks;
  ptx::st_global_4(out.part(block) + thread, ptx::ld_global_4(input + block * kFlagThreads + thread));
  ptx::sync_block();
  if (thread == 0) {
    ptx::st_release_global_4(out.counter(block), 1);
    ptx::wait_global_at_least(out.counter(next), 1);
  }
  ptx::sync_block();
  const uint32_t theirs = ptx::ld_global_4(out.part(next) + thread);
  if (block == kBlocks - 1) ptx::st_global_4(output + thread, theirs);
}

// A warp reads the flag that the other has set before a barrier.
template <int kBlocks>
FFPA_KERNEL(kFlagThreads, 1)
void acquire_kernel(const uint32_t* input, uint32_t* output) {
  const FlagOutput out{output};
  const int thread = ptx::thread_x();
  if (thread == 0) ptx::st_release_global_4(out.counter(0), ptx::ld_global_4(input));
  ptx::sync_block();
  ptx::st_global_4(output + thread, ptx::ld_acquire_global_4(out.counter(0)));
}

inline std::vector<Case> flag_cases() {
  const auto flag_case = [](const char* name, LaunchStatus (*run)(const uint32_t*, uint32_t*)) {
    return Case{name, 80, Input::kBits, kFlagWords, kFlagOutputWords, 0, run};
  };
  return {
      flag_case("wait_global_at_least", run_flags<flag_chain_kernel<kFlagBlocks>, false>),
      flag_case("atom_add_acq_rel_global", run_flags<last_block_kernel<kFlagBlocks, false>, false>),
      flag_case("fence_acq_rel_gpu", run_flags<last_block_kernel<kFlagBlocks, true>, false>),
      flag_case("red_add_release_global", run_flags<meeting_kernel<kFlagBlocks>, true>),
      flag_case("st_release_global_4", run_flags<flag_ring_kernel<kFlagBlocks>, true>),
      flag_case("ld_acquire_global_4", run_flags<acquire_kernel<1>, false, 1>),
  };
}

}  // namespace ffpa::cases
