// From a Config and its kernel to an Instance: the only place that launches kernels. Included by generated files alone,
// and free of torch headers, which would cost each of them seconds.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "launch/instance.h"

namespace ffpa {

template <class Config, auto kKernel>
class Launcher {
  using Params = typename Config::Params;
  static_assert(std::is_trivially_copyable_v<Params>, "parameters reach the GPU as plain bytes");

 public:
  static constexpr Instance instance(const char* name) { return {name, sizeof(Params), &launch}; }

 private:
  // A kernel may use more than 48 KB of shared memory only after asking. Asking for all there is costs nothing (how
  // much a launch takes is what counts), and fits whatever number of stages comes later.
  static cudaError_t allow_all_shared_memory(int device) {
    static std::atomic<uint64_t> done{0};  // one bit a device
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

  static cudaError_t launch(const void* params, int device, cudaStream_t stream, LaunchShape* shape) {
    const Params& typed = *static_cast<const Params*>(params);
    *shape = Config::launch_shape(typed);
    cudaError_t error = allow_all_shared_memory(device);
    if (error == cudaSuccess) {
      cudaLaunchAttribute cluster{};
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {shape->cluster.x, shape->cluster.y, shape->cluster.z};

      cudaLaunchConfig_t config{};
      config.gridDim = dim3(shape->grid.x, shape->grid.y, shape->grid.z);
      config.blockDim = dim3(shape->threads);
      config.dynamicSmemBytes = shape->smem_bytes;
      config.stream = stream;
      config.attrs = &cluster;
      // GPUs before sm_90 refuse the attribute, even for a cluster of one block.
      config.numAttrs = shape->cluster.x * shape->cluster.y * shape->cluster.z > 1;
      error = cudaLaunchKernelEx(&config, kKernel, typed);
    }
    if (error != cudaSuccess) cudaGetLastError();  // reported here, so the next call must not see it again
    return error;
  }
};

}  // namespace ffpa
