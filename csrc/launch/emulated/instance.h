// One kernel of the emulator's module. Each generated file registers its own kernels; module.cpp finds them by name.
#pragma once

#include <cstddef>
#include <map>
#include <string>

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
  using Params = typename Config::Params;

  static EmulatedInstance instance() {
    const auto shape = [](const void* params) { return Config::launch_shape(*static_cast<const Params*>(params)); };
    const auto launch = [](const void* params) {
      const Params& typed = *static_cast<const Params*>(params);
      return launch_config<Config, kKernel>(typed, Config::launch_shape(typed), nullptr);
    };
    return {sizeof(Params), launch, shape};
  }
};

}  // namespace ffpa
