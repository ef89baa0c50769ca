// Global memory: the tensors that a kernel may touch. Everything else is out of bounds.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

namespace ffpa::emu {

enum class Access { kReadOnly, kReadWrite, kAtomic };  // kAtomic: read and write, and blocks may do so at once

struct GlobalRange {
  uintptr_t end;
  Access access;
};
using RangesByBase = std::multimap<uintptr_t, GlobalRange>;

// Registers [base, base + bytes) for the launches that start while this object lives. Ranges may overlap or repeat
// (views of one tensor): a byte may be accessed if any of them allows it.
class RegisteredRange {
 public:
  RegisteredRange(const void* base, size_t bytes, Access access);
  ~RegisteredRange();
  RegisteredRange(const RegisteredRange&) = delete;
  RegisteredRange& operator=(const RegisteredRange&) = delete;

 private:
  RangesByBase::iterator place_;
};

// A number for each 2 bytes of global memory: 0 until it is set.
class GlobalMarks {
 public:
  // Calls visit(mark) for the marks of these bytes, which it may set if `sets`. Else it may miss marks that are 0.
  template <class Visit>
  void for_each(uintptr_t address, size_t bytes, bool sets, Visit visit) {
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

enum class Verdict { kFine, kReadOnly, kOutside };

// The ranges that are registered when a launch begins. Adjacent tensors do not merge: an access that runs from one into
// the next is out of bounds. All OS threads of a launch share it.
class GlobalMemory {
 public:
  GlobalMemory();

  Verdict check(uintptr_t address, size_t bytes, Access wanted) const;

  // Nothing orders the accesses of two clusters, so where one has written, no other may read or write: returns false
  // where it does.
  bool note_access(uintptr_t address, size_t bytes, Access access, uint32_t cluster);

  // Returns a text like " (ends 130 bytes past a range of 4096 bytes)", or an empty one when nothing is near.
  std::string describe_neighbour(uintptr_t address, size_t bytes) const;

 private:
  RangesByBase by_base_;
  std::mutex mutex_;
  GlobalMarks writers_;  // 1 + the cluster that wrote there
};

}  // namespace ffpa::emu
