// Makes an Instance from a Config and its kernel. Only generated files include this header; it is free of torch
// headers, which would cost each of them seconds.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "launch/instance.h"
#include "launch/launch.cuh"

namespace ffpa {

template <class Config, auto kKernel>
class Launcher {
  using Params = typename Config::Params;

 public:
  static constexpr Instance instance(const char* name) { return {name, sizeof(Params), &launch_kernel}; }

 private:
  // A kernel may use more than 48 KB of shared memory only after asking. Asking for all that there is costs nothing
  // (only the size of a launch counts), and fits whatever number of stages comes later.
  static cudaError_t allow_all_shared_memory(int device) {
    static std::atomic<uint64_t> done{0};  // one bit for each device
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if (done.load(std::memory_order_relaxed) & bit) return cudaSuccess;
    int most = 0;
    cudaError_t error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kKernel);
    if (error == cudaSuccess) {
      const int most_dynamic = most - static_cast<int>(attributes.sharedSizeBytes);
      error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_dynamic);
    }
    if (error == cudaSuccess) done.fetch_or(bit, std::memory_order_relaxed);
    return error;
  }

  static LaunchStatus launch_kernel(const void* params, int device, void* stream, LaunchShape* shape) {
    const Params& typed = *static_cast<const Params*>(params);
    *shape = Config::launch_shape(typed);
    const cudaError_t error = allow_all_shared_memory(device);
    const LaunchStatus status =
        error == cudaSuccess ? launch_config<Config, kKernel>(typed, *shape, stream) : ptx::status_of(error);
    if (!status.ok()) cudaGetLastError();  // the error is reported here: the next call must not see it again
    return status;
  }
};

}  // namespace ffpa
