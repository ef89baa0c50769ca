// ldmatrix and stmatrix (sm_90): a warp moves 8×8 tiles of 16-bit elements between shared memory and fragments.
//
// Lane 8·t + r names the 16-byte aligned address of row r of tile t; lanes of absent tiles are ignored.
// Register t of lane l then holds row l/4, columns 2·(l%4) and 2·(l%4) + 1 of tile t; with `_trans`, column l/4 and
// rows 2·(l%4), 2·(l%4) + 1.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/ldmatrix.cuh"
#else
#include "ptx/emulated/ldmatrix.cuh"
#endif
