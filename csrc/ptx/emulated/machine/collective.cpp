#include "ptx/emulated/machine/collective.h"

#include "ptx/emulated/machine/shared_memory.h"

namespace ffpa::emu {

bool arrive_at_collective(const Instruction& op, void* arguments) {
  Lane& lane = *current;
  Warp& warp = *lane.warp;
  count_step(op.site);
  if (!warp.arrived) {
    warp.op = op;
  } else if (!(warp.op == op)) {
    fail("divergence", op.site, "this lane executes %s while lanes %08x of its warp wait in %s at %s", op.name,
         warp.arrived, warp.op.name, to_string(warp.op.site).c_str());
  }
  warp.arguments[lane.index] = arguments;
  warp.arrived |= 1u << lane.index;
  if (warp.arrived != kAllLanes) {
    block_lane(op);
    return false;
  }
  warp.arrived = 0;
  flush_access_logs(warp);
  return true;
}

void leave_collective() {
  wake(*current->warp, kAllLanes);
  maybe_preempt();
}

}  // namespace ffpa::emu
