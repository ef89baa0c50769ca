// setmaxnreg (sm_90a): moves registers from warpgroups that need few to those that need many.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/register_budget.cuh"
#else
#include "ptx/emulated/register_budget.cuh"
#endif
