// Starts a kernel: the one host function whose two versions are a CUDA launch and a run of the emulator. Kernels are
// launched through launch/launch.cuh, which adds the types of the arguments.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/grid_launch.cuh"
#else
#include "ptx/emulated/grid_launch.cuh"
#endif
