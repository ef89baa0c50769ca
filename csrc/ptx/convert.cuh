// Conversions between float and packed 16-bit pairs, and products of pairs; to four packed 8-bit floats. The lowest
// part is the element with the smallest index.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/convert.cuh"
#else
#include "ptx/emulated/convert.cuh"
#endif
