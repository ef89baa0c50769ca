// Emulated side of ptx/grid_launch.cuh.
#pragma once

#include <mutex>
#include <set>
#include <string>

#include "ptx/emulated/machine/run.h"
#include "ptx/launch_types.h"

namespace ffpa::ptx {

// Keeps the message of a failed launch for whoever asks: failures are few. It is no thread-local of its own, as each
// module of the emulator has those in the little space that the loader reserves (machine.h).
inline const char* kept_message(const std::string& message) {
  static std::mutex mutex;
  static std::set<std::string> messages;
  const std::lock_guard<std::mutex> lock(mutex);
  return messages.insert(message).first->c_str();
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
  return {1, kept_message("emulator: " + report.summary())};
}

}  // namespace ffpa::ptx
