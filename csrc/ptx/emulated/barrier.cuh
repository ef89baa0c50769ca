// Emulated side of ptx/barrier.cuh.
#pragma once

#include "ptx/emulated/call_site.cuh"

namespace ffpa::ptx {

void sync_block(CallSite site = CallSite());
void bar_sync(int barrier, int threads, CallSite site = CallSite());
void bar_arrive(int barrier, int threads, CallSite site = CallSite());

// Lanes see each other's memory at once here; only barriers order accesses in the race check.
inline void fence_block() {}

}  // namespace ffpa::ptx
