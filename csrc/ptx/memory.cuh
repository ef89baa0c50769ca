// Loads and stores of 2, 4, 8 and 16 bytes, in shared memory (32-bit addresses) and global memory (pointers). From
// global memory, single bytes can be loaded too; there is also an atomic addition on it.
//
// Addresses must be multiples of the access size. Values of 8 and 16 bytes are arrays of 32-bit registers, lowest
// address first.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/memory.cuh"
#else
#include "ptx/emulated/memory.cuh"
#endif
