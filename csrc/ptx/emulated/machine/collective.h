// Warp collectives: all 32 lanes come to the same instruction of the same source line, and the last one executes it.
#pragma once

#include "ptx/emulated/machine/machine.h"

namespace ffpa::emu {

// Registers the current lane's arrival; fails with "divergence" when other lanes wait in another collective. Returns
// whether it was the last lane, which then has to execute the instruction, and to leave or to block.
bool arrive_at_collective(const Instruction& op, void* arguments);
void leave_collective();

// `execute(warp)` runs once for the warp and finds every lane's `arguments` in warp.arguments.
template <class Execute>
void collective(const Instruction& op, void* arguments, Execute execute) {
  if (!arrive_at_collective(op, arguments)) return;
  execute(*current->warp);
  leave_collective();
}

template <class Execute>
void sm90_collective(const Instruction& op, void* arguments, Execute execute) {
  require_sm90(op);
  collective(op, arguments, execute);
}

template <class Arguments>
Arguments& arguments_of(Warp& warp, int lane) {
  return *static_cast<Arguments*>(warp.arguments[lane]);
}

}  // namespace ffpa::emu
