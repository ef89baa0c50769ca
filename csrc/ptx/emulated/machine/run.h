// Runs a grid on the emulator.
#pragma once

#include <functional>

#include "ptx/emulated/machine/machine.h"

namespace ffpa::emu {

// Runs `kernel` once for every CUDA thread of the grid, and returns what happened. It never throws, aborts or hangs,
// whatever the kernel does; after a failure the results in global memory are incomplete.
Report run_grid(const GridShape& shape, const std::function<void()>& kernel, const Options& options);

// The options of launches that bring none of their own (all of them, through launch/launch.cuh), and the sum of their
// reports.
Options current_options();
void set_current_options(const Options& options);
void add_to_session(const Report& report);
Report take_session_report();  // also starts a new report

}  // namespace ffpa::emu
