#include "ptx/emulated/machine/global_accesses.h"

#include "ptx/emulated/machine/machine.h"

namespace ffpa::emu {
namespace {

// Tells whether each time in `most` is at least that in `some`.
bool covers(const ClusterTimes& most, const ClusterTimes& some) {
  return std::all_of(some->begin(), some->end(), [&](const auto& entry) {
    const auto theirs = most->find(entry.first);
    return theirs != most->end() && std::equal(entry.second.begin(), entry.second.end(), theirs->second.begin(),
                                               [](uint32_t time, uint32_t known) { return time <= known; });
  });
}

std::string describe(const GlobalAccess& access) {
  return format("block (%u, %u, %u) in %s at %s", access.block.x, access.block.y, access.block.z,
                access.instruction.name, to_string(access.instruction.site).c_str());
}

}  // namespace

// Most often one of the two knows all that the other does: then they share it.
void FarClock::join(ClusterTimes& mine, const ClusterTimes& theirs) {
  if (!theirs || mine == theirs) return;
  if (!mine || covers(theirs, mine)) {
    mine = theirs;
  } else if (!covers(mine, theirs)) {
    auto both = std::make_shared<TimesOfClusters>(*mine);
    for (const auto& [cluster, times] : *theirs) {
      auto& known = (*both)[cluster];
      for (int i = 0; i < kClocks; ++i) known[i] = std::max(known[i], times[i]);
    }
    mine = both;
  }
}

// Returns a mark for the access, after others of its kind. What the access knows of needs no mark any more: whoever
// must come after both comes after this one.
uint32_t GlobalMemory::mark_of(GlobalAccess now, uint32_t previous, const VectorClock& clock) {
  for (; previous; previous = accesses_[previous - 1].previous) {
    const GlobalAccess& other = accesses_[previous - 1];
    const bool is_before = other.cluster == now.cluster
                               ? other.time <= clock.at[other.warp]
                               : is_known(clock.far.known, other.cluster, other.warp, other.time);
    if (!is_before || (other.writes() && !now.writes())) break;
  }
  now.previous = previous;
  constexpr size_t kRecent = 4;  // the lanes of a warp come here one after the other
  for (size_t i = accesses_.size(), last = i > kRecent ? i - kRecent : 0; i-- > last;) {
    if (now == accesses_[i]) return uint32_t(i + 1);
  }
  accesses_.push_back(now);
  return uint32_t(accesses_.size());
}

uint32_t GlobalMemory::note_access(uintptr_t address, size_t bytes, const GlobalAccess& now, const VectorClock& clock,
                                   Proxy proxy, std::string& conflict) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool writes = now.writes(), strong = now.is_strong();
  uint32_t compared = 0;
  const auto compare = [&](uint32_t mark) {
    if (mark == compared) return;
    compared = mark;
    for (; mark && conflict.empty(); mark = accesses_[mark - 1].previous) {
      const GlobalAccess& other = accesses_[mark - 1];
      const bool conflicts = (writes || other.writes()) && !(strong && other.is_strong());
      if (other.cluster == now.cluster || !conflicts) continue;
      const auto is_in = [&](const ClusterTimes& times) {
        return is_known(times, other.cluster, other.warp, other.time);
      };
      const char* missing = !is_in(clock.far.known) ? "no release and acquire between" : nullptr;
      if (other.time == kNever) missing = "it is not complete: bulk_wait_group by that thread missing";
      const bool unfenced = proxy == Proxy::kAsync && other.writes() && !is_in(clock.far.fenced);
      if (!missing && unfenced) missing = "fence_proxy_async_global missing";
      if (!missing) continue;
      conflict =
          format("another block %s: %s (%s)", other.writes() ? "wrote" : "read", describe(other).c_str(), missing);
    }
  };

  uint32_t own = 0, before = 0;
  const auto note = [&](uint32_t& mark) {
    compare(mark);
    if (own == 0 || mark != before) own = mark_of(now, before = mark, clock);
    mark = own;
  };
  const bool overwrites = writes && !strong;
  if (overwrites) own = mark_of(now, 0, clock);
  writes_.for_each(address, bytes, overwrites, [&](uint32_t& mark) {
    compare(mark);
    if (overwrites) mark = own;
  });
  // A read and an atomic access join those that are there; an ordinary write comes after them all.
  const auto compare_and_end = [&](uint32_t& mark) {
    compare(mark);
    if (overwrites) mark = 0;
  };
  if (strong) {
    if (writes) reads_.for_each(address, bytes, false, compare);
    atomics_.for_each(address, bytes, true, note);
  } else {
    atomics_.for_each(address, bytes, false, compare_and_end);
    if (overwrites) reads_.for_each(address, bytes, false, compare_and_end);
    if (now.access == Access::kReadOnly) reads_.for_each(address, bytes, true, note);
  }
  return own;
}

void GlobalMemory::set_time(const std::vector<uint32_t>& marks, uint32_t time) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const uint32_t mark : marks) {
    if (mark) accesses_[mark - 1].time = time;
  }
}

std::string GlobalMemory::describe_last_change(const void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  uint32_t last = 0;
  const auto find = [&](uint32_t mark) {
    while (mark && !accesses_[mark - 1].writes()) mark = accesses_[mark - 1].previous;
    if (last == 0) last = mark;
  };
  atomics_.for_each(reinterpret_cast<uintptr_t>(address), 4, false, find);
  writes_.for_each(reinterpret_cast<uintptr_t>(address), 4, false, find);
  return last ? "last changed by " + describe(accesses_[last - 1]) : "no block has changed it";
}

uint64_t GlobalMemory::changes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return changes_;
}

bool GlobalMemory::wait_for_change(uint64_t seen) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (changes_ != seen) return true;
  ++waiting_;
  if (--running_ == 0) changed_.notify_all();
  changed_.wait(lock, [&] { return changes_ != seen || running_ == 0; });
  return changes_ != seen;
}

void GlobalMemory::leave(bool gives_up) {
  std::lock_guard<std::mutex> lock(mutex_);
  given_up_ |= gives_up;
  if (--running_ == 0) changed_.notify_all();
}

bool GlobalMemory::given_up() {
  std::lock_guard<std::mutex> lock(mutex_);
  return given_up_;
}

}  // namespace ffpa::emu
