// Barriers between the warps of a block.
//
// Barrier 0 belongs to sync_block; 1 … 15 are free. Thread counts are multiples of 32 and the same for everybody who
// uses a barrier in one round.
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

}  // namespace ffpa::ptx
