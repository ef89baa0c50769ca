// Warp collectives: all 32 lanes come to the same instruction of the same source line, and the last one executes it.
#pragma once

#include "ptx/emulated/machine/bank_conflicts.h"
#include "ptx/emulated/machine/machine.h"
#include "ptx/emulated/machine/scheduler.h"

namespace ffpa::emu {

enum class WarpOp : int {
  kShuffle,
  kVote,
  kSyncWarp,
  kLdmatrix,
  kStmatrix,
  kMma,
  kBarSync,
  kBarArrive,
  kElect,
  kSetMaxRegisters,
  kClusterArrive,
  kClusterWait,
  kWgmma,
  kWgmmaFence,
  kWgmmaCommit,
  kWgmmaWait,
};

const char* name_of(WarpOp op);

// Says whether the lanes of the warp go on at once, or sleep until somebody wakes the warp.
enum class After { kContinue, kSleep };

// Registers the current lane's arrival; fails with "divergence" when other lanes wait in another collective. Returns
// whether it was the last lane, which then has to execute the instruction.
bool arrive_at_collective(WarpOp op, void* arguments, CallSite site);
void leave_collective(WarpOp op, CallSite site, After after);

// `execute(warp)` runs once for the warp and finds every lane's `arguments` in warp.arguments.
template <class Execute>
void collective(WarpOp op, void* arguments, CallSite site, Execute&& execute) {
  if (!arrive_at_collective(op, arguments, site)) return;
  const After after = execute(*current->warp);
  leave_collective(op, site, after);
}

template <class Arguments>
Arguments& arguments_of(Warp& warp, int lane) {
  return *static_cast<Arguments*>(warp.arguments[lane]);
}

}  // namespace ffpa::emu
