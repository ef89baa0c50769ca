// One compiled kernel as the host sees it, and the table of all. Each generated file defines one `extern "C" Instance
// ffpa_instance_<spec>`, the same in the wheel's library and in a library compiled on demand.
#pragma once

#include <cstddef>

#include "ptx/launch_types.h"

namespace ffpa {

struct Instance {
  const char* name;          // name of the spec
  std::size_t params_bytes;  // sizeof(Config::Params): exposes a caller that has another struct

  // Enqueues the kernel on `stream` (a cudaStream_t) of `device`, which must be current. It sets *shape to what was
  // asked for, whatever the result is, so that a failure can be described.
  LaunchStatus (*launch)(const void* params, int device, void* stream, LaunchShape* shape);
};

// The table of all instances compiled into the wheel's library; generation.py writes it.
struct InstanceTable {
  const Instance* const* instances;
  int count;
};
extern const InstanceTable kBuiltInInstances;

}  // namespace ffpa
