// Emulated side of ptx/grid_launch.cuh.
#pragma once

#include <functional>

#include "ptx/launch_types.h"

namespace ffpa::emu {
LaunchStatus run_grid(const LaunchShape& shape, const std::function<void()>& kernel);
}  // namespace ffpa::emu

namespace ffpa::ptx {

// Runs the grid to its end; `stream` has no meaning here.
template <class... Parameters>
LaunchStatus launch_grid(void (*kernel)(Parameters...), const LaunchShape& shape, void* stream,
                         Parameters... arguments) {
  (void)stream;
  if (shape.counter != nullptr) *shape.counter = 0;
  return emu::run_grid(shape, [&] { kernel(arguments...); });
}

}  // namespace ffpa::ptx
