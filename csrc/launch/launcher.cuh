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
  // One bit for each device: what was asked for there, and whether its code waits for earlier kernels itself.
  static inline std::atomic<uint64_t> done{0}, can_wait{0};

  static uint64_t bit_of(int device) { return device < 64 ? uint64_t{1} << device : 0; }

  // A kernel may use more than 48 KB of shared memory only after asking. Asking for all that there is costs nothing
  // (only the size of a launch counts), and fits whatever number of stages comes later. Code for GPUs before sm_90 does
  // not wait for earlier kernels, and must not start before these have ended.
  static cudaError_t allow_all_shared_memory(int device) {
    const uint64_t bit = bit_of(device);
    if (done.load(std::memory_order_relaxed) & bit) return cudaSuccess;
    int most = 0;
    cudaError_t error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kKernel);
    if (error == cudaSuccess) {
      const int most_dynamic = most - static_cast<int>(attributes.sharedSizeBytes);
      error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_dynamic);
    }
    if (error == cudaSuccess) {
      int driver = 0;
      constexpr int kCapturesEarlyStarts = 12030;  // the first driver that takes them into CUDA graphs
      cudaDriverGetVersion(&driver);
      if (attributes.ptxVersion >= 90 && driver >= kCapturesEarlyStarts)
        can_wait.fetch_or(bit, std::memory_order_relaxed);
      done.fetch_or(bit, std::memory_order_relaxed);
    }
    return error;
  }

  static LaunchStatus launch_kernel(const void* params, int device, void* stream, LaunchShape* shape) {
    const Params& typed = *static_cast<const Params*>(params);
    *shape = Config::launch_shape(typed);
    const cudaError_t error = allow_all_shared_memory(device);
    shape->starts_early &= (can_wait.load(std::memory_order_relaxed) & bit_of(device)) != 0;
    const LaunchStatus status =
        error == cudaSuccess ? launch_config<Config, kKernel>(typed, *shape, stream) : ptx::status_of(error);
    if (!status.ok()) cudaGetLastError();  // the error is reported here: the next call must not see it again
    return status;
  }
};

}  // namespace ffpa
