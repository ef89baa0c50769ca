// One kernel of the emulator's module. Each generated file registers its own kernels; module.cpp finds them by name.
#pragma once

#include <cstddef>
#include <cstring>
#include <map>
#include <string>

#include "launch/launch.cuh"

namespace ffpa {

struct EmulatedInstance {
  std::size_t params_bytes;
  LaunchStatus (*launch)(const std::string& params);
  LaunchShape (*shape)(const std::string& params);
};

inline std::map<std::string, EmulatedInstance>& emulated_instances() {
  static std::map<std::string, EmulatedInstance> instances;
  return instances;
}

template <class Config, auto kKernel>
EmulatedInstance emulated_instance() {
  using Params = typename Config::Params;
  // Python has their bytes in a string of its own, which is not aligned.
  static constexpr auto read = [](const std::string& bytes) {
    Params params;
    std::memcpy(&params, bytes.data(), sizeof(params));
    return params;
  };
  const auto launch = [](const std::string& bytes) {
    const Params params = read(bytes);
    return launch_config<Config, kKernel>(params, Config::launch_shape(params), nullptr);
  };
  return {sizeof(Params), launch, [](const std::string& bytes) { return Config::launch_shape(read(bytes)); }};
}

}  // namespace ffpa
