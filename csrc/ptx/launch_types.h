// The shape that a launch needs and the status that it returns, the same for both compilers.
#pragma once

#include <cstdint>

namespace ffpa {

struct GridDim {
  uint32_t x = 1, y = 1, z = 1;
};

struct LaunchShape {
  GridDim grid;                 // blocks in each dimension
  int threads = 32;             // threads per block, a multiple of 32
  uint32_t smem_bytes = 0;      // bytes of dynamic shared memory of a block
  GridDim cluster;              // blocks in each dimension; every side divides the grid's
  uint32_t* counter = nullptr;  // counter in global memory, or null; 0 when the kernel starts
};

struct LaunchStatus {
  int code = 0;              // 0, a cudaError_t, or 1 in emulation
  const char* message = "";  // valid until this thread's next launch
  bool ok() const { return code == 0; }
};

template <int kCount>
LaunchStatus first_failure(const LaunchStatus (&statuses)[kCount]) {
  for (const LaunchStatus& status : statuses) {
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace ffpa
