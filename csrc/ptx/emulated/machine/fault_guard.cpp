#include "ptx/emulated/machine/fault_guard.h"

#include <csignal>
#include <mutex>

#include "ptx/emulated/machine/machine.h"

namespace ffpa::emu {
namespace {

constexpr size_t kFaultStackBytes = 256 << 10;

std::mutex guard_mutex;
int guard_count = 0;
struct sigaction previous_action;

void on_fault(int signal, siginfo_t* info, void*) {
  if (!current || !current->warp) {
    // The fault is not the emulator's. The instruction faults again and reaches the previous action, now back in place.
    sigaction(signal, &previous_action, nullptr);
    return;
  }
  // `fail` leaves this handler for good, so the signal has to be unblocked by hand.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, signal);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  fail("segfault", CallSite("kernel", 0),
       format("access to %p: a plain pointer out of bounds, or a stack overflow; the last instruction that the warp "
              "gathered in is %s",
              info->si_addr, to_string(current->warp->op_site).c_str()));
}

}  // namespace

FaultGuard::FaultGuard() {
  std::lock_guard<std::mutex> lock(guard_mutex);
  if (guard_count++) return;
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &previous_action);
}

FaultGuard::~FaultGuard() {
  std::lock_guard<std::mutex> lock(guard_mutex);
  if (--guard_count == 0) sigaction(SIGSEGV, &previous_action, nullptr);
}

FaultStack::FaultStack() : previous_(new stack_t), memory_(new char[kFaultStackBytes]) {
  stack_t stack = {};
  stack.ss_sp = memory_;
  stack.ss_size = kFaultStackBytes;
  sigaltstack(&stack, static_cast<stack_t*>(previous_));
}

FaultStack::~FaultStack() {
  sigaltstack(static_cast<stack_t*>(previous_), nullptr);
  delete static_cast<stack_t*>(previous_);
  delete[] memory_;
}

}  // namespace ffpa::emu
