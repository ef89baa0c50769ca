// TMA (sm_90): bulk copies of boxes of a tensor between global and shared memory, by the async proxy.
//
// One thread issues a copy. Coordinates count elements, innermost dimension first. Shared addresses are 128-byte
// aligned, and 1024-byte aligned when a wgmma descriptor with 128-byte swizzle is to name them.
//
// A load completes on an mbarrier; what of the box lies outside the tensor becomes zero.
//
// A store leaves alone what lies outside the tensor. It completes in two steps, for which the thread that issued it
// commits and waits: from bulk_wait_group_read on its shared memory may be overwritten, from bulk_wait_group on the
// thread sees what it wrote, and others do after a barrier. The thread exits after the first of them at the earliest.
//   before it:  stores to shared memory, fence_proxy_async by who made them, a barrier, the store
//   after it:   bulk_wait_group, fence_proxy_async_global, a barrier, loads of what it wrote by threads of its block
#pragma once

#include "base/compiler.h"

namespace ffpa::ptx {

// What becomes of the lines of a copy in the L2 cache. kSoon is for what passes through once, or from far: it makes
// room for others first.
enum class Evict { kNormal, kSoon };

}  // namespace ffpa::ptx

#if FFPA_CUDA
#include "ptx/native/tma.cuh"
#else
#include "ptx/emulated/tma.cuh"
#endif
