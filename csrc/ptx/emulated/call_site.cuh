// Emulated side of ptx/native/call_site.cuh: the source line that called an emulated instruction. Every report names
// it.
#pragma once

namespace ffpa::ptx {

struct CallSite {
  const char* file;
  int line;

  // The default argument `CallSite site = CallSite()` of every emulated instruction calls this: the builtins then name
  // the place of the call. It has to be a constructor: inside an aggregate initialiser g++ 12 names the callee instead.
  constexpr CallSite(const char* file = __builtin_FILE(), int line = __builtin_LINE()) : file(file), line(line) {}

  bool operator==(const CallSite& other) const { return line == other.line && file == other.file; }
  bool operator!=(const CallSite& other) const { return !(*this == other); }
};

}  // namespace ffpa::ptx

namespace ffpa::emu {
using ptx::CallSite;
}  // namespace ffpa::emu
