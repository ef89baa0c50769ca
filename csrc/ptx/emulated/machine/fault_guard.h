// Turns a SIGSEGV inside a kernel (a plain pointer gone wrong, a stack overflow) into an error of the report.
#pragma once

namespace ffpa::emu {

// The handler is installed while the object lives; several objects may live at once, on any thread. Faults outside
// emulated lanes go to whoever handled them before.
class FaultGuard {
 public:
  FaultGuard();
  ~FaultGuard();
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;
};

// Gives the calling OS thread a separate stack to handle faults on: the stack that faults may be the problem.
class FaultStack {
 public:
  FaultStack();
  ~FaultStack();
  FaultStack(const FaultStack&) = delete;
  FaultStack& operator=(const FaultStack&) = delete;

 private:
  void* previous_;
  char* memory_;
};

}  // namespace ffpa::emu
