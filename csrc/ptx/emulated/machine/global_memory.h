// Global memory: the tensors a kernel may touch. Everything else is out of bounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace ffpa::emu {

enum class Access { kReadOnly, kReadWrite };

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

// The ranges registered when a launch begins, merged for quick lookup. Adjacent tensors do not merge: an access that
// runs from one into the next is out of bounds.
class GlobalRanges {
 public:
  static GlobalRanges snapshot();

  // nullptr when the access is fine, else what is wrong with it.
  const char* check(const void* address, size_t bytes, Access wanted) const;

  // " (130 bytes past the end of a range of 4096 bytes)", or empty when nothing is near.
  void describe_neighbour(const void* address, size_t bytes, char* text, size_t text_bytes) const;

 private:
  struct Range {
    uintptr_t end;
    Access access;
  };
  std::multimap<uintptr_t, Range> by_base_;
  uintptr_t longest_ = 0;
};

}  // namespace ffpa::emu
