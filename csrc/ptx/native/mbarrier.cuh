// mbarrier: barriers in shared memory that count arrivals of threads and asynchronous copies. sm_80 has
// mbarrier_init, _arrive and _wait; bytes (TMA) and blocks of a cluster came with sm_90.
//
// A barrier is 8 bytes, 8-byte aligned. Its phase completes when the expected arrivals have come and all expected bytes
// have landed. A waiter names the parity of the phase it waits for: 0 for the first, and a wait for parity 1 on a fresh
// barrier returns at once. Parities tell only neighbouring phases apart, so nobody may fall a phase behind.
//
// The PTX manual has it in "Parallel Synchronization and Communication Instructions: mbarrier".
#pragma once

#include <cstdint>

#include "base/compiler.h"

namespace ffpa::ptx {

// mbarrier.init: `arrivals` threads have to arrive for each phase.
FFPA_DEVICE void mbarrier_init(uint32_t barrier_smem, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier_smem), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: makes the initialisation visible to the cluster and to the async proxy; a barrier of the block
// or cluster has to follow. sm_80 has neither cluster nor async proxy, so there the block's barrier is enough.
FFPA_DEVICE void fence_mbarrier_init() {
#if FFPA_SM90
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// mbarrier.arrive: counts one arrival. The state it could return goes to `_`: nobody uses it, as waits go by parity.
FFPA_DEVICE void mbarrier_arrive(uint32_t barrier_smem) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier_smem) : "memory");
}

// Arrives on the barrier at this address in block `rank` of the cluster, which says that the thread has read what it
// wanted. It does not tell the other block what the thread has written: `.release.cluster` would be a fence of the
// whole GPU's memory at every arrival (MEMBAR.ALL.GPU: a third of a product's time).
FFPA_DEVICE void mbarrier_arrive_remote(uint32_t barrier_smem, uint32_t rank) {
  asm volatile(
      "{\n"
      "  .reg .b32 remote;\n"
      "  mapa.shared::cluster.u32 remote, %0, %1;\n"
      "  mbarrier.arrive.release.cta.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier_smem),
      "r"(rank)
      : "memory");
}

// mbarrier.arrive.expect_tx: arrives, and makes the phase wait for `bytes` bytes of asynchronous copies.
FFPA_DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier_smem, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_smem), "r"(bytes) : "memory");
}

// mbarrier.try_wait.parity in a loop: try_wait suspends the thread for a while by itself. sm_80 has only test_wait,
// which spins.
#if FFPA_SM90
#define FFPA_MBARRIER_POLL "mbarrier.try_wait"
#else
#define FFPA_MBARRIER_POLL "mbarrier.test_wait"
#endif
FFPA_DEVICE void mbarrier_wait(uint32_t barrier_smem, uint32_t parity) {
  asm volatile(
      "{\n"
      "  .reg .pred complete;\n"
      "try_again:\n"
      "  " FFPA_MBARRIER_POLL
      ".parity.shared::cta.b64 complete, [%0], %1;\n"
      "  @complete bra done;\n"
      "  bra try_again;\n"
      "done:\n"
      "}" ::"r"(barrier_smem),
      "r"(parity)
      : "memory");
}
#undef FFPA_MBARRIER_POLL

}  // namespace ffpa::ptx
