// What other files need of loads, stores and cp.async.
#pragma once

#include "ptx/emulated/machine/machine.h"

namespace ffpa::emu {

// Fails unless the current lane may access these bytes of global memory.
void check_global(const void* address, uint32_t bytes, uint32_t alignment, Access access,
                  const Instruction& instruction, GlobalProxy proxy = GlobalProxy::kGeneric);

// mbarriers call this to complete the lane's copies up to this time (PendingCopy::time). Its own waits may still come.
void land_tracked_copies(Lane& lane, uint32_t time);

}  // namespace ffpa::emu
