// This file says where a thread is, and has what it does together with the others of its warp, its block and its
// cluster: shuffles, votes, barriers, mbarriers.
//
// Every function of a warp (shuffles, votes, elect_one, sync_warp) must be reached by all 32 lanes together.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "ptx/call_site.h"

namespace ffpa::ptx {

// The compiler's own names for %tid, %ctaid and %nctaid let it reason about ranges, which asm would hide.
FFPA_DEVICE int thread_x() { return threadIdx.x; }
// Reads the thread index again. A persistent kernel would otherwise hold what it derives from its thread index in
// registers from beginning to end; what it derives from this value is computed anew and lives only while it is needed.
FFPA_DEVICE int thread_x_anew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
FFPA_DEVICE int block_x() { return blockIdx.x; }
FFPA_DEVICE int block_y() { return blockIdx.y; }
FFPA_DEVICE int block_z() { return blockIdx.z; }
FFPA_DEVICE int grid_x() { return gridDim.x; }
FFPA_DEVICE int grid_y() { return gridDim.y; }
FFPA_DEVICE int grid_z() { return gridDim.z; }

// Blocks are one-dimensional, so the lane follows from the thread index and needs no register read.
FFPA_DEVICE int lane_id() { return threadIdx.x % 32; }

// Returns the shared address of the block's dynamic shared memory, 1024-byte aligned (as the widest TMA swizzle needs).
FFPA_DEVICE uint32_t dynamic_smem() {
  extern __shared__ __align__(1024) uint8_t dynamic_smem_storage[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(dynamic_smem_storage));
}

// %cluster_ctarank: returns this block's number in its cluster.
FFPA_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The compiler's intrinsics are these instructions one to one (shfl.sync, vote.sync, bar.warp.sync), and unlike asm
// they can be scheduled and folded.
inline constexpr uint32_t kFullWarp = 0xffffffffu;

// shfl.sync.bfly: returns the value of lane (lane ^ lane_mask).
template <class Value>
FFPA_DEVICE Value shfl_xor(Value value, int lane_mask, CallSite = CallSite()) {
  static_assert(sizeof(Value) == 4, "shuffles move 32-bit registers");
  return __shfl_xor_sync(kFullWarp, value, lane_mask);
}

// shfl.sync.idx: returns the value of lane source_lane % 32.
template <class Value>
FFPA_DEVICE Value shfl_idx(Value value, int source_lane) {
  static_assert(sizeof(Value) == 4, "shuffles move 32-bit registers");
  return __shfl_sync(kFullWarp, value, source_lane);
}

// vote.sync.ballot: bit l is the predicate of lane l.
FFPA_DEVICE uint32_t vote_ballot(bool predicate) { return __ballot_sync(kFullWarp, predicate); }
FFPA_DEVICE bool vote_any(bool predicate) { return __any_sync(kFullWarp, predicate); }
FFPA_DEVICE bool vote_all(bool predicate) { return __all_sync(kFullWarp, predicate); }

// bfind.u32: returns the highest bit set (in a ballot, the last lane that said yes), or -1 where no bit is set.
FFPA_DEVICE int bfind(uint32_t bits) {
  int highest;
  asm("bfind.u32 %0, %1;" : "=r"(highest) : "r"(bits));
  return highest;
}

// bar.warp.sync: memory accesses of the warp's lanes before it are visible to all of them after it.
FFPA_DEVICE void sync_warp(CallSite = CallSite()) { __syncwarp(); }

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

// Barriers between the warps of a block: 0 belongs to sync_block; 1 … 15 are free. Thread counts are multiples of 32
// and the same for everybody who uses a barrier in one round.

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

// barrier.cluster, "Parallel Synchronization and Communication Instructions: barrier.cluster": joins all threads of all
// blocks of the cluster. It is split into two halves so that work fits between them, and `.aligned` because whole warps
// come here together.
FFPA_DEVICE void cluster_arrive(CallSite = CallSite()) {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
FFPA_DEVICE void cluster_wait(CallSite = CallSite()) {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// mbarrier: barriers in shared memory that count arrivals of threads and asynchronous copies. sm_80 has
// mbarrier_init, _arrive and _wait; bytes (TMA) and blocks of a cluster came with sm_90.
//
// A barrier is 8 bytes, 8-byte aligned. Its phase completes when the expected arrivals have come and all expected bytes
// have landed. A waiter names the parity of the phase it waits for: 0 for the first, and a wait for parity 1 on a fresh
// barrier returns at once. Parities tell only neighbouring phases apart, so nobody may fall a phase behind.
//
// The PTX manual has it in "Parallel Synchronization and Communication Instructions: mbarrier".

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

// A kernel that starts early (LaunchShape::starts_early) does so as the last blocks of the one before it end, or when
// that one lets it, and waits for its end itself. Code for GPUs before sm_90 has no such instruction, and is never
// started early.

// griddepcontrol.launch_dependents: a kernel that starts early may do so once all blocks have called this, or have
// ended. What the calling kernel writes is visible to it only after it has waited.
FFPA_DEVICE void let_next_kernel_start() {
#if FFPA_SM90
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// griddepcontrol.wait: waits until all kernels before this one have ended, and what they wrote is visible.
FFPA_DEVICE void wait_for_earlier_kernels() {
#if FFPA_SM90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ffpa::ptx
