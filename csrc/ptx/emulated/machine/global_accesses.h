// This file records what the clusters of a launch do in global memory, for the race check between them, and what the
// flags tell by which they wait for each other.
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "ptx/emulated/machine/run.h"
#include "ptx/emulated/machine/vector_clock.h"
#include "ptx/launch_types.h"

namespace ffpa::emu {

enum class Proxy { kGeneric, kAsync };

// A number for each 2 bytes of global memory: 0 until it is set.
class GlobalMarks {
 public:
  // Calls visit(mark) for the marks of these bytes, which it may set if `sets`. Else it may miss marks that are 0, and
  // only set others to 0.
  template <class Visit>
  void for_each(uintptr_t address, size_t bytes, bool sets, Visit visit) {
    if (!sets && pages_.empty()) return;
    for (uintptr_t at = address, next; at < address + bytes; at = next) {
      next = std::min((at / kPageBytes + 1) * kPageBytes, address + bytes);
      const auto page = sets ? pages_.try_emplace(at / kPageBytes).first : pages_.find(at / kPageBytes);
      if (page == pages_.end()) continue;
      for (; at < next; at += kUnitBytes) visit(page->second[at % kPageBytes / kUnitBytes]);
    }
  }

 private:
  static constexpr uintptr_t kPageBytes = 4096, kUnitBytes = 2;
  std::unordered_map<uintptr_t, std::array<uint32_t, kPageBytes / kUnitBytes>> pages_;
};

inline constexpr uint32_t kNever = ~0u;

// This is an access to global memory, as the race check remembers it.
struct GlobalAccess {
  Access access;
  uint32_t cluster;
  int warp;       // as a VectorClock counts them
  uint32_t time;  // kNever: nobody can know of it yet
  size_t store;   // number of a TMA store in its cluster, which has a time of its own
  GridDim block;
  Instruction instruction;
  uint32_t previous = 0;  // mark of an access of its kind that nothing orders before this one, or 0

  bool writes() const {
    return access != Access::kReadOnly && access != Access::kAcquire && access != Access::kBulkRead;
  }
  bool is_strong() const { return access == Access::kAtomic || access == Access::kAcquire; }

  bool operator==(const GlobalAccess& other) const {
    return std::tie(access, cluster, warp, time, store, previous) ==
               std::tie(other.access, other.cluster, other.warp, other.time, other.store, other.previous) &&
           instruction == other.instruction;
  }
};

// A Verdict says what a range of bytes allows.
enum class Verdict { kReadWrite, kReadOnly, kOutside };

// This has the ranges that are registered when a launch begins, and what its clusters have done there. Adjacent tensors
// do not merge: an access that runs from one into the next is out of bounds. All OS threads of a launch share it.
class GlobalMemory {
 public:
  explicit GlobalMemory(int os_threads);

  Verdict check(uintptr_t address, size_t bytes) const;

  // Records an access by somebody with this knowledge. Returns its mark, and in `conflict` what another cluster did
  // there if nothing orders the two. Accesses of one cluster are not compared.
  uint32_t note_access(uintptr_t address, size_t bytes, const GlobalAccess& now, const VectorClock& clock, Proxy proxy,
                       std::string& conflict);

  // Says when a TMA store was complete.
  void set_time(const std::vector<uint32_t>& marks, uint32_t time);

  // Calls change(what an acquire at this address learns), alone. It `writes` where waiting blocks should look again.
  template <class Change>
  void at_flag(const void* address, bool writes, Change change) {
    std::lock_guard<std::mutex> lock(mutex_);
    change(flags_[address]);
    if (!writes) return;
    ++changes_;
    running_ += waiting_;
    waiting_ = 0;
    changed_.notify_all();
  }

  // Returns a text like "last changed by block (1, 0, 0) in st.release.global at file:12".
  std::string describe_last_change(const void* address);

  // An OS thread whose clusters all wait looks how many changes there have been, looks at the flags, and waits for
  // another change. It gets false where none can come, because all others wait, too, or have left.
  uint64_t changes();
  bool wait_for_change(uint64_t seen);
  void leave(bool gives_up);
  bool given_up();

  // Returns a text like " (ends 130 bytes past a range of 4096 bytes)", or an empty one when nothing is near.
  std::string describe_neighbour(uintptr_t address, size_t bytes) const;

 private:
  uint32_t mark_of(GlobalAccess now, uint32_t previous, const VectorClock& clock);

  RangesByBase by_base_;
  std::mutex mutex_;
  std::vector<GlobalAccess> accesses_;  // a mark is 1 + a place here
  // The last write of each place, and those reads and atomic accesses since then that nothing orders.
  GlobalMarks writes_, reads_, atomics_;
  std::unordered_map<const void*, FarClock> flags_;
  std::condition_variable changed_;
  uint64_t changes_ = 0;
  int running_, waiting_ = 0;  // OS threads
  bool given_up_ = false;
};

}  // namespace ffpa::emu
