// Exchange and synchronisation inside one warp. Every function but bfind must be reached by all 32 lanes together.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/warp.cuh"
#else
#include "ptx/emulated/warp.cuh"
#endif
