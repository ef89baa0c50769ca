// Global memory: the tensors that a kernel may touch. Everything else is out of bounds.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace ffpa::emu {

enum class Access { kReadOnly, kReadWrite, kAtomic };  // kAtomic: read and write, and blocks may do so at once

// Registers [base, base + bytes) for the launches that start while this object lives. Ranges may overlap or repeat
// (views of one tensor): a byte may be accessed if any of them allows it.
class RegisteredRange {
 public:
  RegisteredRange(const void* base, size_t bytes, Access access);
  ~RegisteredRange();
  RegisteredRange(const RegisteredRange&) = delete;
  RegisteredRange& operator=(const RegisteredRange&) = delete;

 private:
  uint64_t id_;
};

// Which cluster of a launch wrote where. Nothing orders the accesses of two clusters, so where one has written, no
// other may read or write.
class GlobalWriters {
 public:
  // Both return false where another cluster wrote before.
  bool read(uintptr_t address, size_t bytes, uint32_t cluster);
  bool write(uintptr_t address, size_t bytes, uint32_t cluster);

 private:
  static constexpr uintptr_t kPageBytes = 4096, kUnitBytes = 2;
  using Page = std::array<uint32_t, kPageBytes / kUnitBytes>;  // 1 + cluster, or 0 for nobody

  std::mutex mutex_;
  std::unordered_map<uintptr_t, Page> pages_;
};

// The ranges registered when a launch begins, sorted for quick lookup. Adjacent tensors do not merge: an access that
// runs from one into the next is out of bounds.
class GlobalRanges {
 public:
  static GlobalRanges snapshot();

  // Returns nullptr when the access is fine, else a text that says what is wrong with it.
  const char* check(const void* address, size_t bytes, Access wanted) const;

  GlobalWriters& writers() const { return *writers_; }

  // Writes a text like " (ends 130 bytes past a range of 4096 bytes)", or an empty one when nothing is near.
  void describe_neighbour(const void* address, size_t bytes, char* text, size_t text_bytes) const;

 private:
  struct Range {
    uintptr_t end;
    Access access;
  };
  std::multimap<uintptr_t, Range> by_base_;
  uintptr_t longest_ = 0;
  std::shared_ptr<GlobalWriters> writers_ = std::make_shared<GlobalWriters>();  // shared by all OS threads
};

}  // namespace ffpa::emu
