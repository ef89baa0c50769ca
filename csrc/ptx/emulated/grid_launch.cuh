// Emulated side of ptx/grid_launch.cuh.
#pragma once

#include <string>

#include "ptx/emulated/machine/run.h"
#include "ptx/launch_types.h"

namespace ffpa::ptx {

// Of this thread's last failed launch. One for all kernels: each module of the emulator has its thread-locals in the
// little space that the loader reserves (machine.h).
inline std::string& launch_message() {
  static thread_local std::string message;
  return message;
}

// Runs the grid to its end under emu::current_options() and adds to the session's report. A report with errors is a
// failed launch. `stream` has no meaning here.
template <class... Parameters>
LaunchStatus launch_grid(void (*kernel)(Parameters...), const LaunchShape& shape, void* stream,
                         Parameters... arguments) {
  (void)stream;
  if (shape.counter != nullptr) *shape.counter = 0;
  emu::GridShape grid;
  grid.grid = {shape.grid.x, shape.grid.y, shape.grid.z};
  grid.cluster = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  grid.threads = shape.threads;
  grid.smem_bytes = shape.smem_bytes;
  const emu::Report report = emu::run_grid(grid, [&] { kernel(arguments...); }, emu::current_options());
  emu::add_to_session(report);
  if (report.ok()) return {};
  launch_message() = "emulator: " + report.summary();
  return {1, launch_message().c_str()};
}

}  // namespace ffpa::ptx
