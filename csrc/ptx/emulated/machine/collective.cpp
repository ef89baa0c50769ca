#include "ptx/emulated/machine/collective.h"

namespace ffpa::emu {

const char* name_of(WarpOp op) {
  switch (op) {
    case WarpOp::kShuffle:
      return "shfl.sync";
    case WarpOp::kVote:
      return "vote.sync";
    case WarpOp::kSyncWarp:
      return "bar.warp.sync";
    case WarpOp::kLdmatrix:
      return "ldmatrix";
    case WarpOp::kStmatrix:
      return "stmatrix";
    case WarpOp::kMma:
      return "mma.sync";
    case WarpOp::kBarSync:
      return "bar.sync";
    case WarpOp::kBarArrive:
      return "bar.arrive";
    case WarpOp::kElect:
      return "elect.sync";
    case WarpOp::kSetMaxRegisters:
      return "setmaxnreg";
    case WarpOp::kClusterArrive:
      return "barrier.cluster.arrive";
    case WarpOp::kClusterWait:
      return "barrier.cluster.wait";
    case WarpOp::kWgmma:
      return "wgmma.mma_async";
    case WarpOp::kWgmmaFence:
      return "wgmma.fence";
    case WarpOp::kWgmmaCommit:
      return "wgmma.commit_group";
    case WarpOp::kWgmmaWait:
      return "wgmma.wait_group";
  }
  return "?";
}

bool arrive_at_collective(WarpOp op, void* arguments, CallSite site) {
  Lane& lane = *current;
  Warp& warp = *lane.warp;
  count_step(site);
  if (!warp.arrived) {
    warp.op = op;
    warp.op_site = site;
  } else if (warp.op != op || warp.op_site != site) {
    fail("divergence", site,
         format("this lane executes %s while lanes %08x of its warp wait in %s at %s", name_of(op), warp.arrived,
                name_of(warp.op), to_string(warp.op_site).c_str()));
  }
  warp.arguments[lane.index] = arguments;
  warp.arrived |= 1u << lane.index;
  if (warp.arrived != kAllLanes) {
    block_lane(name_of(op), site);
    return false;
  }
  warp.arrived = 0;
  ++machine->report.counters.collectives;
  if (!warp.access_logs.empty()) flush_access_logs(warp);
  return true;
}

void leave_collective(WarpOp op, CallSite site, After after) {
  if (after == After::kContinue) {
    wake(*current->warp, kAllLanes);
    maybe_preempt();
  } else {
    block_lane(name_of(op), site);
  }
}

}  // namespace ffpa::emu
