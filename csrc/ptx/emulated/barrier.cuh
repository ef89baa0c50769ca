// Emulated side of ptx/native/barrier.cuh.
#pragma once

#include "ptx/emulated/machine/warp_ops.h"

namespace ffpa::ptx {

inline void sync_block(emu::CallSite site = emu::CallSite()) { emu::barrier_sync(0, emu::kWholeBlock, site); }

inline void bar_sync(int barrier, int threads, emu::CallSite site = emu::CallSite()) {
  emu::barrier_sync(barrier, threads, site);
}

inline void bar_arrive(int barrier, int threads, emu::CallSite site = emu::CallSite()) {
  emu::barrier_arrive(barrier, threads, site);
}

}  // namespace ffpa::ptx
