// The driver's functions, fetched through the runtime, so that nothing links with libcuda.
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

}  // namespace ffpa::ptx
