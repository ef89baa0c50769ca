// GPU side of ptx/grid_launch.cuh.
#pragma once

#include <cuda_runtime.h>

#include "ptx/launch_types.h"
#include "ptx/native/driver.h"

namespace ffpa::ptx {

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
  cudaLaunchAttribute attributes[2] = {};
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
