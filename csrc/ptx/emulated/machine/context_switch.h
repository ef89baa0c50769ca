// Switches between the stacks of CUDA threads.
#pragma once

#include <cstddef>

#if defined(__x86_64__) && !defined(FFPA_EMU_UCONTEXT)
#define FFPA_EMU_FAST_SWITCH 1
#else
#define FFPA_EMU_FAST_SWITCH 0
#include <ucontext.h>
#endif

namespace ffpa::emu {

// A suspended flow of control. A default-constructed one receives the caller's flow in switch_to.
struct Context {
#if FFPA_EMU_FAST_SWITCH
  void* stack_pointer = nullptr;
#else
  ucontext_t registers;
#endif
  const void* stack_low = nullptr;  // AddressSanitizer has to know the stacks; unused otherwise
  size_t stack_bytes = 0;
  void* sanitizer_state = nullptr;
};

// Makes `context` start in `entry` on the given stack when it is first switched to. `entry` must never return. The
// first `poisoned_bytes` of stack that it will use are NaN, so that variables nobody has set show.
void prepare(Context& context, char* stack_low, size_t stack_bytes, size_t poisoned_bytes, void (*entry)());

// Saves the running flow in `from` and resumes `to`. `from_is_finished` says that nobody will resume `from` again.
void switch_to(Context& from, Context& to, bool from_is_finished = false);

// This must be the first statement of every `entry`.
void finish_first_switch(Context& launcher);

}  // namespace ffpa::emu
