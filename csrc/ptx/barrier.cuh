// Barriers between the warps of a block, and memory fences.
//
// Barrier 0 belongs to sync_block; 1 … 15 are free. Thread counts are multiples of 32 and the same for everybody who
// uses a barrier in one round.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/barrier.cuh"
#else
#include "ptx/emulated/barrier.cuh"
#endif
