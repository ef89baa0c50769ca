// KernelLaunches are the kernels that a call runs one after another, as Python describes them once for all calls of a
// kind: each has its Config's Params, of one type. A call brings the addresses of its tensors, which all of them take.
#pragma once

#include <cstdint>

namespace ffpa {

struct KernelLaunches {
  int kernels, addresses;
  int params_bytes;  // of one kernel
  int device;
  const uint64_t* kernel;  // what ffpa_find_kernel() gives
  const uint8_t* params;   // of one kernel after the other
  const int* place;        // where each address goes in Params, in bytes
};

}  // namespace ffpa
