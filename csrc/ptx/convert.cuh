// Conversions between float and packed 16-bit pairs, and products of pairs. The low half of a pair is the element with
// the smaller index.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/convert.cuh"
#else
#include "ptx/emulated/convert.cuh"
#endif
