// GPU side of ptx/cluster.cuh.
#pragma once

#include <cstdint>

#include "base/compiler.h"

namespace ffpa::ptx {

// %cluster_ctarank: this block's number in its cluster.
FFPA_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// barrier.cluster, "Parallel Synchronization and Communication Instructions: barrier.cluster": all threads of all
// blocks of the cluster. Split into two halves so that work fits between them. `.aligned`: whole warps come here
// together.
FFPA_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
FFPA_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// elect.sync: true in one lane of the warp, not necessarily lane 0. Unlike a comparison of the lane index it tells the
// compiler that one thread runs the branch.
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
