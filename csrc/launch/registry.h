// Maps a name to its Instance: those that the wheel holds, and those compiled on demand since.
#pragma once

#include <string>

#include "launch/instance.h"

namespace ffpa {

// The table of all instances compiled into the wheel's library; generation.py writes it.
struct InstanceTable {
  const Instance* const* instances;
  int count;
};
extern const InstanceTable kBuiltInInstances;

// Returns the instance of this name, or throws std::runtime_error where there is none.
const Instance& find_instance(const std::string& name);

}  // namespace ffpa

// Opens a library compiled on demand and registers its instance of `spec` under `name`. The library stays open. Returns
// null, or a message that says what is wrong, which this thread must read before its next call.
extern "C" __attribute__((visibility("default"))) const char* ffpa_load_kernel(const char* path, const char* spec,
                                                                               const char* name);
