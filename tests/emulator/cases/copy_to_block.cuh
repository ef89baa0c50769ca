// A copy from the shared memory of one block to that of another, used rightly and misused.
#pragma once

#include "cases/case.h"
#include "ptx/instructions.cuh"

namespace ffpa::cases {

// The mistake that a kernel makes, for the tests of the emulator.
enum class CopyBug {
  kNone,
  kNoProxyFence,
  kReadsEarly,         // reads before the copy has landed
  kOverwritesUnread,   // overwrites what the other block has not read yet
  kWritesSourceEarly,  // overwrites the source before the copy has read it
  kLeavesEarly,        // exits before the other block has copied
};

// In each of two rounds, the two blocks of a cluster swap 512 bytes.
template <CopyBug kBug>
FFPA_KERNEL(32, 1)
void copy_to_block_kernel(const uint32_t* input, uint32_t* output) {
  constexpr uint32_t kBytes = 512, kWords = kBytes / 4;
  const uint32_t lane = ptx::lane_id(), rank = ptx::cluster_rank();
  const uint32_t received = ptx::dynamic_smem(), full = received + 3 * kBytes, empty = full + 8;
  if (lane == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init(empty, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  for (uint32_t round = 0; round < 2; ++round) {
    const uint32_t sent = received + (kBug == CopyBug::kOverwritesUnread ? 1 + round : 1) * kBytes;
    const uint32_t place = (round * 2 + rank) * kWords + lane * 4;
    uint32_t words[4];
    ptx::ld_global_16(words, input + place);
    // The other block has read what it got the round before, and the copy has read its source, when this wait ends.
    const bool waits = round > 0 && kBug != CopyBug::kOverwritesUnread;
    if (waits && kBug != CopyBug::kWritesSourceEarly) ptx::mbarrier_wait(empty, 0);
    ptx::st_shared_16(sent + lane * 16, words);
    if (waits && kBug == CopyBug::kWritesSourceEarly) ptx::mbarrier_wait(empty, 0);
    if (kBug != CopyBug::kNoProxyFence) ptx::fence_proxy_async();
    ptx::sync_warp();
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(full, kBytes);
      ptx::copy_to_block(received, sent, kBytes, full, 1 - rank);
    }
    if (kBug == CopyBug::kLeavesEarly && rank == 1) return;
    if (kBug != CopyBug::kReadsEarly) ptx::mbarrier_wait(full, round);
    ptx::ld_shared_16(words, received + lane * 16);
    if (kBug == CopyBug::kReadsEarly) ptx::mbarrier_wait(full, round);
    ptx::st_global_16(output + place, words);
    ptx::sync_warp();
    if (lane == 0) ptx::mbarrier_arrive_remote(empty, 1 - rank);
  }
  // Nobody leaves while its shared memory is still a target.
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

template <CopyBug kBug>
LaunchStatus run_copy_to_block(const uint32_t* input, uint32_t* output) {
  LaunchShape shape;
  shape.grid = {2, 1, 1};
  shape.cluster = {2, 1, 1};
  shape.threads = 32;
  shape.smem_bytes = 2048;
  return launch(shape, nullptr, copy_to_block_kernel<kBug>, input, output);
}

}  // namespace ffpa::cases
