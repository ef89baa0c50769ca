// Clusters (sm_90): blocks that run together and see each other's shared memory.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "ptx/native/call_site.cuh"

namespace ffpa::ptx {

// %cluster_ctarank: returns this block's number in its cluster.
FFPA_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// barrier.cluster, "Parallel Synchronization and Communication Instructions: barrier.cluster": joins all threads of all
// blocks of the cluster. It is split into two halves so that work fits between them, and `.aligned` because whole warps
// come here together.
FFPA_DEVICE void cluster_arrive(CallSite = CallSite()) {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
FFPA_DEVICE void cluster_wait(CallSite = CallSite()) {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// cp.async.bulk: copies from the shared memory of this block to that of block `rank` of the cluster, and completes on
// the mbarrier at this address there. Whoever has waited for that phase knows that the source has been read, too.
FFPA_DEVICE void copy_to_block(uint32_t destination_smem, uint32_t source_smem, uint32_t bytes, uint32_t barrier_smem,
                               uint32_t rank) {
  asm volatile(
      "{\n"
      "  .reg .b32 destination, barrier;\n"
      "  mapa.shared::cluster.u32 destination, %0, %4;\n"
      "  mapa.shared::cluster.u32 barrier, %3, %4;\n"
      "  cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [destination], [%1], %2, [barrier];\n"
      "}" ::"r"(destination_smem),
      "r"(source_smem), "r"(bytes), "r"(barrier_smem), "r"(rank)
      : "memory");
}

// elect.sync: returns true in one lane of the warp, not necessarily lane 0. Unlike a comparison of the lane index it
// tells the compiler that one thread runs the branch.
FFPA_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      "  .reg .pred leader;\n"
      "  elect.sync _|leader, 0xffffffff;\n"
      "  selp.b32 %0, 1, 0, leader;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace ffpa::ptx
