// Emulated side of ptx/native/warp.cuh.
#pragma once

#include <cstdint>
#include <cstring>

#include "ptx/emulated/machine/warp_ops.h"

namespace ffpa::ptx {

template <class Value>
inline Value shuffle_value(emu::Shuffle kind, Value value, int argument, emu::CallSite site) {
  static_assert(sizeof(Value) == 4, "shuffles move 32-bit registers");
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = emu::shuffle(kind, bits, argument, site);
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

template <class Value>
inline Value shfl_xor(Value value, int lane_mask, emu::CallSite site = emu::CallSite()) {
  return shuffle_value(emu::Shuffle::kXor, value, lane_mask, site);
}

template <class Value>
inline Value shfl_idx(Value value, int source_lane, emu::CallSite site = emu::CallSite()) {
  return shuffle_value(emu::Shuffle::kIndex, value, source_lane, site);
}

inline uint32_t vote_ballot(bool predicate, emu::CallSite site = emu::CallSite()) {
  return emu::ballot(predicate, site);
}
inline bool vote_any(bool predicate, emu::CallSite site = emu::CallSite()) { return emu::ballot(predicate, site) != 0; }
inline bool vote_all(bool predicate, emu::CallSite site = emu::CallSite()) {
  return emu::ballot(predicate, site) == ~0u;
}

inline int bfind(uint32_t bits) { return bits == 0 ? -1 : 31 - __builtin_clz(bits); }

inline void sync_warp(emu::CallSite site = emu::CallSite()) { emu::sync_warp(site); }

}  // namespace ffpa::ptx
