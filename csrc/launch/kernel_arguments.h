// The arguments of a kernel: its Config's Params or, where they take more than a copy (TMA descriptors), the Arguments
// that the Config makes of them. The instance's own file makes them: callers know Params only.
#pragma once

#include <type_traits>

#include "ptx/launch_types.h"

namespace ffpa {

template <class Config, class = void>
struct KernelArguments {
  using Type = typename Config::Params;
  static LaunchStatus make(const Type& params, Type& arguments) {
    arguments = params;
    return {};
  }
};

template <class Config>
struct KernelArguments<Config, std::void_t<typename Config::Arguments>> {
  using Type = typename Config::Arguments;
  static LaunchStatus make(const typename Config::Params& params, Type& arguments) {
    return Config::arguments(params, arguments);
  }
};

}  // namespace ffpa
