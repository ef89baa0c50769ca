// The instructions that kernels and their tests use are here, one function each. native/ has them in assembly and says
// what they do, emulated/ has the same functions in C++.
#pragma once

#include "base/compiler.h"

#if FFPA_CUDA
#include "ptx/native/async_copy.cuh"
#include "ptx/native/barrier.cuh"
#include "ptx/native/call_site.cuh"
#include "ptx/native/cluster.cuh"
#include "ptx/native/convert.cuh"
#include "ptx/native/kernel_order.cuh"
#include "ptx/native/ldmatrix.cuh"
#include "ptx/native/math.cuh"
#include "ptx/native/mbarrier.cuh"
#include "ptx/native/memory.cuh"
#include "ptx/native/mma.cuh"
#include "ptx/native/register_budget.cuh"
#include "ptx/native/special_registers.cuh"
#include "ptx/native/tma.cuh"
#include "ptx/native/warp.cuh"
#include "ptx/native/wgmma.cuh"
#else
#include "ptx/emulated/async_copy.cuh"
#include "ptx/emulated/barrier.cuh"
#include "ptx/emulated/call_site.cuh"
#include "ptx/emulated/cluster.cuh"
#include "ptx/emulated/convert.cuh"
#include "ptx/emulated/kernel_order.cuh"
#include "ptx/emulated/ldmatrix.cuh"
#include "ptx/emulated/math.cuh"
#include "ptx/emulated/mbarrier.cuh"
#include "ptx/emulated/memory.cuh"
#include "ptx/emulated/mma.cuh"
#include "ptx/emulated/register_budget.cuh"
#include "ptx/emulated/special_registers.cuh"
#include "ptx/emulated/tma.cuh"
#include "ptx/emulated/warp.cuh"
#include "ptx/emulated/wgmma.cuh"
#endif
