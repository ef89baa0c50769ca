// The place of a thread: its index, its block's index, the grid's extent, and where its dynamic shared memory starts.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/special_registers.cuh"
#else
#include "ptx/emulated/special_registers.cuh"
#endif
