// Vector clocks: who has seen which moment of whom. The exact base of the race check.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ffpa::emu {

inline constexpr int kMaxWarps = 64;           // of one cluster
inline constexpr int kAsyncAgent = kMaxWarps;  // the TMA unit has its own time
inline constexpr int kNobody = 255;

// Time of every warp, as far as the owner knows it. A warp's own entry advances whenever others may learn from it; an
// access made at time t of warp w happened before everything whose clock has at[w] >= t.
struct VectorClock {
  uint32_t at[kMaxWarps + 1] = {};

  void join(const VectorClock& other) {
    for (int i = 0; i <= kMaxWarps; ++i) at[i] = std::max(at[i], other.at[i]);
  }
};

}  // namespace ffpa::emu
