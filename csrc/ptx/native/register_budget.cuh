// setmaxnreg (sm_90a): moves registers from warpgroups that need few to those that need many.
// The PTX manual has it in "Miscellaneous Instructions: setmaxnreg".
#pragma once

#include "base/compiler.h"

namespace ffpa::ptx {

// Every warp of a warpgroup executes it. kRegisters counts registers per thread: 24 … 256, a multiple of 8. It takes
// effect only in kernels whose FFPA_KERNEL names the number of blocks per SM.
template <int kRegisters>
FFPA_DEVICE void increase_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "setmaxnreg takes 24, 32, ... 256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
FFPA_DEVICE void decrease_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "setmaxnreg takes 24, 32, ... 256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace ffpa::ptx
