// A CallSite is the place in a kernel that a report should name. Functions of ptx record the place of their caller; a
// helper above ptx that wants its own caller named takes a `ptx::CallSite site = ptx::CallSite()` as last parameter and
// hands it on. On a GPU it is empty and costs nothing.
#pragma once

#include "base/compiler.h"

namespace ffpa::ptx {

#if FFPA_CUDA

struct CallSite {};

#else

struct CallSite {
  const char* file;
  int line;

  // The default argument `CallSite site = CallSite()` of every emulated instruction calls this: the builtins then name
  // the place of the call. It has to be a constructor: inside an aggregate initialiser g++ 12 names the callee instead.
  constexpr CallSite(const char* file = __builtin_FILE(), int line = __builtin_LINE()) : file(file), line(line) {}

  bool operator==(const CallSite& other) const { return line == other.line && file == other.file; }
  bool operator!=(const CallSite& other) const { return !(*this == other); }
};

#endif

}  // namespace ffpa::ptx
