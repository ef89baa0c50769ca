// Clusters (sm_90): blocks that run together and see each other's shared memory.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/cluster.cuh"
#else
#include "ptx/emulated/cluster.cuh"
#endif
