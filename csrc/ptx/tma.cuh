// TMA (sm_90): bulk copies of boxes of a tensor from global to shared memory, by the async proxy.
//
// One thread issues a copy; it completes on an mbarrier. What of the box lies outside the tensor becomes zero.
// Coordinates count elements, innermost dimension first. Destinations are 128-byte aligned, and 1024-byte aligned when
// a wgmma descriptor with 128-byte swizzle is to name them.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/tma.cuh"
#else
#include "ptx/emulated/tma.cuh"
#endif
