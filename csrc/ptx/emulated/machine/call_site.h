// The source line of a kernel that called an emulated instruction; every report names it.
#pragma once

#include <string>

namespace ffpa::emu {

struct CallSite {
  const char* file;
  int line;

  // The default argument `CallSite site = CallSite()` of every emulated instruction calls this: the builtins then name
  // the place of the call. It has to be a constructor: inside an aggregate initialiser g++ 12 names the callee instead.
  constexpr CallSite(const char* file = __builtin_FILE(), int line = __builtin_LINE()) : file(file), line(line) {}

  bool operator==(const CallSite& other) const { return line == other.line && file == other.file; }
  bool operator!=(const CallSite& other) const { return !(*this == other); }
};

// Returns "file.cuh:123", without directories.
std::string to_string(CallSite site);

// Works as printf does, into a string.
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

}  // namespace ffpa::emu
