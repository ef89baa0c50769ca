// Conversions between float and packed pairs of 16-bit elements, products of such pairs, and conversions from float to
// four packed 8-bit floats. The lowest part of a register is the element with the smallest index.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/convert.cuh"
#else
#include "ptx/emulated/convert.cuh"
#endif
