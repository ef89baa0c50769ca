// Vector clocks: who has seen which moment of whom. They are the exact base of the race check.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ffpa::emu {

inline constexpr int kMaxWarps = 64;           // warps of one cluster
inline constexpr int kAsyncAgent = kMaxWarps;  // clock of the TMA unit, which has its own time
inline constexpr int kClocks = kAsyncAgent + 1 + kMaxWarps;
inline constexpr int kNobody = 255;

// A warp's cp.async have a time of their own, which only the mbarriers that track them make known: whoever knows the
// copies of a warp need not know what else it has done. The time of a copy is its lane's next cp.async.mbarrier.arrive,
// counted from 1. The lanes of a warp share the entry, as if all had arrived equally often.
inline constexpr int copies_of(int warp) { return kAsyncAgent + 1 + warp; }

// The time of every warp, as far as the owner knows it. A warp's own entry advances whenever others may learn from it;
// an access made at time t of warp w happened before everything whose clock has at[w] >= t.
struct VectorClock {
  uint32_t at[kClocks] = {};

  void join(const VectorClock& other) {
    for (int i = 0; i < kClocks; ++i) at[i] = std::max(at[i], other.at[i]);
  }
};

}  // namespace ffpa::emu
