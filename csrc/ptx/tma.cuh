// TMA (sm_90): bulk copies of boxes of a tensor between global and shared memory, by the async proxy.
//
// One thread issues a copy. Coordinates count elements, innermost dimension first. Shared addresses are 128-byte
// aligned, and 1024-byte aligned when a wgmma descriptor with 128-byte swizzle is to name them.
//
// A load completes on an mbarrier; the part of the box that lies outside the tensor becomes zero.
//
// A store leaves everything outside the tensor alone. It completes in two steps; its thread commits it and waits for
// each. After bulk_wait_group_read the shared memory may be overwritten; after bulk_wait_group the thread sees what the
// store wrote, and other threads do after a barrier. The thread exits after the first step at the earliest.
//   before it:  stores to shared memory, fence_proxy_async by the threads that made them, a barrier, the store
//   after it:   bulk_wait_group, fence_proxy_async_global, a barrier, loads of the written bytes by its block's threads
#pragma once

#include "base/compiler.h"

namespace ffpa::ptx {

// The treatment of a copy's lines in the L2 cache. kSoon is for data that passes through once, or that comes from far
// away: its lines are the first to make room for others.
enum class Evict { kNormal, kSoon };

}  // namespace ffpa::ptx

#if FFPA_CUDA
#include "ptx/native/tma.cuh"
#else
#include "ptx/emulated/tma.cuh"
#endif
