// wgmma (sm_90a): D[64×N] += A[64×16] · B[16×N] by a warpgroup (4 warps), asynchronously, with operands in shared
// memory.
//
// d[kN / 2] of a lane: warp w of the group has rows 16·w … 16·w + 15; d[4·j + v] is value v of the m16n8k16 C fragment
// (tile/fragments.cuh) at columns 8·j … 8·j + 7. a[4] is an m16n8k16 A fragment of the warp's 16 rows.
// Order of use: wgmma_fence, products, wgmma_commit_group, wgmma_wait_group; accumulators and `a` are not to be touched
// from the fence to the wait.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/wgmma.cuh"
#else
#include "ptx/emulated/wgmma.cuh"
#endif
