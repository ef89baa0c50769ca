// One kernel of the emulator's module. Each generated file registers its own kernels; module.cpp finds them by name.
#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "launch/kernel_arguments.h"
#include "launch/launch.cuh"

namespace ffpa {

struct EmulatedInstance {
  std::size_t params_bytes;
  LaunchStatus (*launch)(const void* params);
  LaunchShape (*shape)(const void* params);
};

inline std::map<std::string, EmulatedInstance>& emulated_instances() {
  static std::map<std::string, EmulatedInstance> instances;
  return instances;
}

template <class Config, auto kKernel>
struct Emulated {
  static LaunchShape shape(const void* params) {
    return Config::launch_shape(*static_cast<const typename Config::Params*>(params));
  }

  static LaunchStatus launch(const void* params) {
    typename KernelArguments<Config>::Type arguments;
    const LaunchStatus status =
        KernelArguments<Config>::make(*static_cast<const typename Config::Params*>(params), arguments);
    return status.ok() ? ffpa::launch(shape(params), nullptr, kKernel, arguments) : status;
  }

  static constexpr EmulatedInstance instance() { return {sizeof(typename Config::Params), &launch, &shape}; }
};

}  // namespace ffpa
