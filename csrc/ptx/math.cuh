// Approximate single-precision functions of the special function unit, and a product that is always rounded by itself.
//
// The emulated twins are correctly rounded (to a few ulp), so results on a GPU differ within the bounds the PTX manual
// states for each instruction; everything else in csrc/ptx agrees bit for bit.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/math.cuh"
#else
#include "ptx/emulated/math.cuh"
#endif
