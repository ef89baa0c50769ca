// launch() is the only way to start a kernel.
#pragma once

#include <type_traits>

#include "ptx/grid_launch.cuh"
#include "ptx/launch_types.h"

namespace ffpa {

// launch(shape, stream, kernel, arguments...) converts arguments to the kernel's parameters, which must be trivially
// copyable. It never throws and never synchronises the GPU; in emulation the kernel has run when it returns.
template <class... Parameters, class... Arguments>
LaunchStatus launch(const LaunchShape& shape, void* stream, void (*kernel)(Parameters...), Arguments... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments), "one argument for each parameter of the kernel");
  static_assert((std::is_trivially_copyable<Parameters>::value && ...), "kernel parameters are copied as bytes");
  return ptx::launch_grid<Parameters...>(kernel, shape, stream, static_cast<Parameters>(arguments)...);
}

}  // namespace ffpa
