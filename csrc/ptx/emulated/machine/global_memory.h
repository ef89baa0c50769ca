// Global memory: the tensors that a kernel may touch. Everything else is out of bounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace ffpa::emu {

// The first two are also what a range allows.
enum class Access {
  kReadOnly,
  kReadWrite,
  kAtomic,     // reads and writes, and blocks may do so at once
  kAcquire,    // reads what others may change at once
  kBulkRead,   // a TMA load, which note_access records only when it lands
  kBulkWrite,  // a TMA store: it has no time until it is complete
};

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

}  // namespace ffpa::emu
