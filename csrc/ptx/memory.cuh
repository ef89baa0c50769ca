// Loads and stores of 2, 4, 8 and 16 bytes, in shared memory (32-bit addresses) and global memory (pointers), from
// where single bytes can be loaded too; and an atomic addition.
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
