// Exchange and synchronisation inside one warp. Every function but bfind must be reached by all 32 lanes together.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "ptx/native/call_site.cuh"

namespace ffpa::ptx {

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

}  // namespace ffpa::ptx
