// The scheduler decides which lane runs next.
#pragma once

#include "ptx/emulated/machine/machine.h"

namespace ffpa::emu {

// Suspends the current lane until somebody wakes it.
void block_lane(const char* why, CallSite site);

// Makes lanes of a warp runnable again.
void wake(Warp& warp, uint32_t lanes);

// Marks a point where, with random seeds, another warp may overtake.
void maybe_preempt();

// Ends the current lane and never returns.
[[noreturn]] void exit_lane();

// Runs all lanes of machine->blocks to their end, or until a failure.
void run_lanes();

// Abandons all lanes and returns to run_lanes.
[[noreturn]] void return_to_launcher();

}  // namespace ffpa::emu
