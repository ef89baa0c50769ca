// One compiled kernel as the host sees it. Each generated file defines one `extern "C" Instance ffpa_instance_<spec>`,
// the same in the wheel's library and in a library compiled on demand.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "attention/launch_shape.h"

namespace ffpa {

struct Instance {
  const char* name;          // of the spec
  std::size_t params_bytes;  // sizeof(Config::Params), so that a caller with another struct is found out

  // Enqueues the kernel on `stream` of `device`, which must be current. *shape holds what was asked for, whatever the
  // result is, so that a failure can be described.
  cudaError_t (*launch)(const void* params, int device, cudaStream_t stream, LaunchShape* shape);
};

}  // namespace ffpa
