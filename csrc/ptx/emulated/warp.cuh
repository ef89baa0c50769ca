// Emulated side of ptx/native/warp.cuh.
#pragma once

#include <cstdint>
#include <cstring>

#include "ptx/emulated/call_site.cuh"
#include "ptx/emulated/special_registers.cuh"

namespace ffpa::emu {
// Returns the value of the lane that `source_lane` names, modulo 32.
uint32_t shuffle(uint32_t value, int source_lane, CallSite site);
}  // namespace ffpa::emu

namespace ffpa::ptx {

template <class Value>
inline Value shfl_idx(Value value, int source_lane, CallSite site = CallSite()) {
  static_assert(sizeof(Value) == 4, "shuffles move 32-bit registers");
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = emu::shuffle(bits, source_lane, site);
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

template <class Value>
inline Value shfl_xor(Value value, int lane_mask, CallSite site = CallSite()) {
  return shfl_idx(value, lane_id() ^ lane_mask, site);
}

uint32_t vote_ballot(bool predicate, CallSite site = CallSite());
inline bool vote_any(bool predicate, CallSite site = CallSite()) { return vote_ballot(predicate, site) != 0; }
inline bool vote_all(bool predicate, CallSite site = CallSite()) { return vote_ballot(predicate, site) == ~0u; }

inline int bfind(uint32_t bits) { return bits == 0 ? -1 : 31 - __builtin_clz(bits); }

void sync_warp(CallSite site = CallSite());

}  // namespace ffpa::ptx
