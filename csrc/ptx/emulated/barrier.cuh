// Emulated side of ptx/native/barrier.cuh.
#pragma once

#include "ptx/emulated/call_site.cuh"

namespace ffpa::ptx {

void sync_block(CallSite site = CallSite());
void bar_sync(int barrier, int threads, CallSite site = CallSite());
void bar_arrive(int barrier, int threads, CallSite site = CallSite());

}  // namespace ffpa::ptx
