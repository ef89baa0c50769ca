// What a kernel's Config asks of a launch, computed from its parameters. Free of CUDA types: any compiler reads it.
#pragma once

#include <cstdint>

namespace ffpa {

struct GridDim {
  uint32_t x = 1, y = 1, z = 1;
};

struct LaunchShape {
  GridDim grid;  // in blocks
  int threads = 32;
  uint32_t smem_bytes = 0;  // dynamic shared memory of a block: sizeof(plan), plus the run-time stages
  GridDim cluster;          // in blocks; every side divides the grid's
};

}  // namespace ffpa
