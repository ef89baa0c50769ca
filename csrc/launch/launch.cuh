// launch() is the only way to start a kernel.
#pragma once

#include <type_traits>

#include "ptx/instructions.cuh"
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

template <class Config, class = void>
inline constexpr bool kMakesArguments = false;
template <class Config>
inline constexpr bool kMakesArguments<Config, std::void_t<typename Config::Arguments>> = true;

// Launches a Config's kernel. Its argument is the Config's Params or, where it takes more than a copy (TMA
// descriptors), its Arguments, which fill() makes of them. The instance's own file makes them: callers know Params
// only.
template <class Config, auto kKernel>
LaunchStatus launch_config(const typename Config::Params& params, const LaunchShape& shape, void* stream) {
  if constexpr (kMakesArguments<Config>) {
    typename Config::Arguments arguments;
    const LaunchStatus status = arguments.fill(params);
    return status.ok() ? launch(shape, stream, kKernel, arguments) : status;
  } else {
    return launch(shape, stream, kKernel, params);
  }
}

}  // namespace ffpa
