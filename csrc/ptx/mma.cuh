// mma.sync m16n8k16: one warp computes D[16×8] += A[16×16] · B[16×8]. tile/fragments.cuh has the (lane, value) maps.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/mma.cuh"
#else
#include "ptx/emulated/mma.cuh"
#endif
