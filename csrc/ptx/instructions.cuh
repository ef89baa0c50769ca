// The instructions that kernels and their tests use are here, one function each, and the start of a kernel, which is a
// CUDA launch or a run of the emulator. native/ has them in assembly and says what they do, emulated/ has the same
// functions in C++.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/arithmetic.cuh"
#include "ptx/native/driver.h"
#include "ptx/native/matrix.cuh"
#include "ptx/native/memory.cuh"
#include "ptx/native/threads.cuh"
#include "ptx/native/tma.cuh"
#include "ptx/native/wgmma.cuh"
#else
#include "ptx/emulated/instructions.cuh"
#endif
