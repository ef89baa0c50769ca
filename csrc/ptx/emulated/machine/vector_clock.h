// This file says what happened before what, which is the exact base of the race checks: who has seen which moment of
// whom.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>

namespace ffpa::emu {

inline constexpr int kMaxWarps = 64;           // warps of one cluster
inline constexpr int kAsyncAgent = kMaxWarps;  // clock of the TMA unit, which has its own time
inline constexpr int kClocks = kAsyncAgent + 1 + kMaxWarps;

// A warp's cp.async have a time of their own, which only the mbarriers that track them make known: whoever knows the
// copies of a warp need not know what else it has done. The time of a copy is its lane's next cp.async.mbarrier.arrive,
// counted from 1. The lanes of a warp share the entry, as if all had arrived equally often.
inline constexpr int copies_of(int warp) { return kAsyncAgent + 1 + warp; }

// ClusterTimes are the times of several clusters, each with the entries of a VectorClock. Many share them, and nobody
// changes them.
using TimesOfClusters = std::map<uint32_t, std::array<uint32_t, kClocks>>;
using ClusterTimes = std::shared_ptr<const TimesOfClusters>;

// A FarClock has what releases and acquires in global memory have told of clusters: of others, and of the own as they
// knew it.
struct FarClock {
  ClusterTimes known;   // null: nothing
  ClusterTimes fenced;  // the part of it that a fence.proxy.async.global has followed

  void join(const FarClock& other) {
    if (known != other.known) join(known, other.known);
    if (fenced != other.fenced) join(fenced, other.fenced);
  }

  static void join(ClusterTimes& mine, const ClusterTimes& theirs);
};

// A VectorClock has the time of every warp of the own cluster, as far as the owner knows it, and what it knows of other
// clusters. A warp's own entry advances whenever others may learn from it; an access made at time t of warp w happened
// before everything whose clock has at[w] >= t.
struct VectorClock {
  uint32_t at[kClocks] = {};
  FarClock far;

  void join(const VectorClock& other) {
    for (int i = 0; i < kClocks; ++i) at[i] = std::max(at[i], other.at[i]);
    far.join(other.far);
  }
};

// Tells whether whoever knows `times` knows this moment of the warp.
inline bool is_known(const ClusterTimes& times, uint32_t cluster, int warp, uint32_t time) {
  if (!times) return false;
  const auto entry = times->find(cluster);
  return entry != times->end() && entry->second[warp] >= time;
}

}  // namespace ffpa::emu
