// GPU side of ptx/barrier.cuh.
#pragma once

#include "base/compiler.h"

namespace ffpa::ptx {

// bar.sync 0: the intrinsic is the same instruction, and the compiler knows that it is convergent.
FFPA_DEVICE void sync_block() { __syncthreads(); }

// bar.sync, "Parallel Synchronization and Communication Instructions: bar": arrives and waits for `threads` arrivals.
// It is `bar` rather than `barrier`, as the aligned form is cheaper and our warps never diverge at one.
FFPA_DEVICE void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// bar.arrive: counts as an arrival and does not wait (a producer's half of the barrier).
FFPA_DEVICE void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// membar.cta: orders this thread's memory accesses as its block sees them.
FFPA_DEVICE void fence_block() { __threadfence_block(); }

}  // namespace ffpa::ptx
