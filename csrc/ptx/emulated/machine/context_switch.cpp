// This is the only inline assembly outside csrc/ptx/native: POSIX has no context switch without a system call.
// swapcontext saves the signal mask, which takes two system calls of ~300 ns, and an emulated tile takes tens of
// thousands of switches; this switch saves the six registers that the System V ABI asks a callee to preserve and takes
// ~5 ns. Other machines (or -DFFPA_EMU_UCONTEXT) use swapcontext.
#include <cstdint>
#include <cstring>

#include "ptx/emulated/machine/machine.h"

#if defined(__SANITIZE_ADDRESS__)
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack_save, const void** bottom_old, size_t* size_old);
void __asan_unpoison_memory_region(const volatile void* address, size_t size);
}
#define FFPA_EMU_ASAN 1
#else
#define FFPA_EMU_ASAN 0
#endif

#if FFPA_EMU_FAST_SWITCH
extern "C" void ffpa_emu_switch_stacks(void** save_stack_pointer, void* load_stack_pointer);
asm(R"(
.text
.globl ffpa_emu_switch_stacks
.hidden ffpa_emu_switch_stacks
.type ffpa_emu_switch_stacks,@function
ffpa_emu_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size ffpa_emu_switch_stacks,.-ffpa_emu_switch_stacks
)");
#endif

namespace ffpa::emu {

void prepare(Context& context, char* stack_low, size_t stack_bytes, size_t poisoned_bytes, void (*entry)()) {
  context.stack_low = stack_low;
  context.stack_bytes = stack_bytes;
  context.sanitizer_state = nullptr;
#if FFPA_EMU_ASAN
  __asan_unpoison_memory_region(stack_low, stack_bytes);  // an abandoned launch leaves its frames poisoned
#endif
  std::memset(stack_low + stack_bytes - poisoned_bytes, 0xff, poisoned_bytes);
#if FFPA_EMU_FAST_SWITCH
  constexpr int kSavedRegisters = 6;
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack_low + stack_bytes) & ~uintptr_t(15));
  *--top = nullptr;  // fills the place of the entry's return address; also aligns the stack as after a call
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  context.stack_pointer = top;
#else
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = stack_low;
  context.registers.uc_stack.ss_size = stack_bytes;
  context.registers.uc_link = nullptr;
  makecontext(&context.registers, entry, 0);
#endif
}

void switch_to(Context& from, Context& to, [[maybe_unused]] bool from_is_finished) {
#if FFPA_EMU_ASAN
  __sanitizer_start_switch_fiber(from_is_finished ? nullptr : &from.sanitizer_state, to.stack_low, to.stack_bytes);
#endif
#if FFPA_EMU_FAST_SWITCH
  ffpa_emu_switch_stacks(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.registers, &to.registers);
#endif
#if FFPA_EMU_ASAN
  __sanitizer_finish_switch_fiber(from.sanitizer_state, nullptr, nullptr);
#endif
}

void finish_first_switch([[maybe_unused]] Context& launcher) {
#if FFPA_EMU_ASAN
  // The launcher runs on the OS thread's own stack, whose bounds only the sanitizer knows; the first thread of a run
  // to start learns them here.
  if (launcher.stack_low) {
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
  } else {
    __sanitizer_finish_switch_fiber(nullptr, &launcher.stack_low, &launcher.stack_bytes);
  }
#endif
}

}  // namespace ffpa::emu
