// What the host calls: the driver's functions, fetched through the runtime, so that nothing links with libcuda, and the
// launch of a kernel.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>

#include "ptx/launch_types.h"

namespace ffpa::ptx {

inline LaunchStatus status_of(cudaError_t error) { return {static_cast<int>(error), cudaGetErrorString(error)}; }

template <class Function>
struct DriverFunction {
  const char* name;
  unsigned first_version;                // 12040 is CUDA 12.4
  std::atomic<Function> known{nullptr};  // set once it is found; a failed search may succeed later

  template <class... Arguments>
  LaunchStatus once(Arguments... arguments) {
    Function function = known.load(std::memory_order_relaxed);
    if (function == nullptr) {
      void* address = nullptr;
      cudaDriverEntryPointQueryResult found;
      const cudaError_t error =
          cudaGetDriverEntryPointByVersion(name, &address, first_version, cudaEnableDefault, &found);
      if (error != cudaSuccess) return status_of(error);
      if (found != cudaDriverEntryPointSuccess)
        return {-1, "the driver is too old: it lacks a function that is needed"};
      known.store(function = reinterpret_cast<Function>(address), std::memory_order_relaxed);
    }
    const CUresult result = function(arguments...);
    return result == CUDA_SUCCESS ? LaunchStatus{} : status_of(static_cast<cudaError_t>(result));  // the same numbers
  }

  // Calls the function, and again where it fails: a thread that has not called the runtime yet has no context, which
  // the driver needs. Setting the thread's device makes its context current.
  template <class... Arguments>
  LaunchStatus operator()(Arguments... arguments) {
    const LaunchStatus status = once(arguments...);
    int device = 0;
    if (status.ok() || cudaGetDevice(&device) != cudaSuccess || cudaSetDevice(device) != cudaSuccess) return status;
    return once(arguments...);
  }
};

inline DriverFunction<decltype(&cuTensorMapEncodeTiled)> encode_tiled{"cuTensorMapEncodeTiled", 12000};
inline DriverFunction<decltype(&cuFuncGetParamInfo)> parameter_info{"cuFuncGetParamInfo", 12040};
inline DriverFunction<decltype(&cuLaunchKernel)> launch_function{"cuLaunchKernel", 4000};

// Launches on `stream` (a cudaStream_t) and does not synchronise. More than 48 KB of shared memory must have been
// allowed once before (launch/launcher.cuh): allowing just what each launch needs would take it away from other
// threads' launches.
template <class... Parameters>
LaunchStatus launch_grid(void (*kernel)(Parameters...), const LaunchShape& shape, void* stream,
                         Parameters... arguments) {
  if (shape.counter != nullptr) {
    const cudaError_t error = cudaMemsetAsync(shape.counter, 0, sizeof(*shape.counter), cudaStream_t(stream));
    if (error != cudaSuccess) return status_of(error);
  }
  cudaLaunchAttribute attributes[3] = {};
  int count = 0;
  // GPUs before sm_90 refuse these attributes, even for clusters of one block.
  if (shape.cluster.x * shape.cluster.y * shape.cluster.z > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = shape.cluster.x;
    attributes[count].val.clusterDim.y = shape.cluster.y;
    attributes[count].val.clusterDim.z = shape.cluster.z;
    ++count;
  }
  if (shape.starts_early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  if (shape.cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count].val.cooperative = 1;
    ++count;
  }

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(shape.grid.x, shape.grid.y, shape.grid.z);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = unsigned(count);
  return status_of(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace ffpa::ptx
