// Kernels that overlap: one that starts early (LaunchShape::starts_early) waits for those before it itself. Code for
// GPUs before sm_90 has no such instructions, and is never started early.
#pragma once

#include "base/compiler.h"

namespace ffpa::ptx {

// griddepcontrol.wait: waits until all kernels before this one have ended, and what they wrote is visible.
FFPA_DEVICE void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// griddepcontrol.launch_dependents: lets the next kernel start as blocks of this one end, if it may start early.
FFPA_DEVICE void start_later_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace ffpa::ptx
