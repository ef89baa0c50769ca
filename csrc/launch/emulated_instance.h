// One kernel of the emulator's module. Each generated file registers its own; emulated_module.cpp finds it by name.
#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "launch/launch.cuh"

namespace ffpa {

using EmulatedLaunch = LaunchStatus (*)(const void* params);

inline std::map<std::string, EmulatedLaunch>& emulated_instances() {
  static std::map<std::string, EmulatedLaunch> instances;
  return instances;
}

template <class Config, auto kKernel>
LaunchStatus launch_emulated(const void* params) {
  const auto& typed = *static_cast<const typename Config::Params*>(params);
  return launch(Config::launch_shape(typed), nullptr, kKernel, typed);
}

}  // namespace ffpa
