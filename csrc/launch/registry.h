// Name -> Instance: what the wheel holds, and what was compiled on demand since.
#pragma once

#include <string>

#include "launch/instance.h"

namespace ffpa {

// Written by generation.py into the wheel's library: every instance compiled into it.
struct InstanceTable {
  const Instance* const* instances;
  int count;
};
extern const InstanceTable kBuiltInInstances;

// Throws std::runtime_error for a name that is not there.
const Instance& find_instance(const std::string& name);

}  // namespace ffpa

// Opens a library compiled on demand and registers its instance of `spec` under `name`. The library stays open. Returns
// what is wrong, for this thread to read before its next call; null where nothing is.
extern "C" __attribute__((visibility("default"))) const char* ffpa_load_kernel(const char* path, const char* spec,
                                                                               const char* name);
