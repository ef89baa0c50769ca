#include "launch/registry.h"

#include <dlfcn.h>

#include <mutex>
#include <stdexcept>
#include <unordered_map>

namespace ffpa {
namespace {

// The instances by name: those built in, and those loaded since.
struct Registry {
  Registry() {
    for (int i = 0; i < kBuiltInInstances.count; ++i) {
      const Instance* instance = kBuiltInInstances.instances[i];
      instances[instance->name] = instance;
    }
  }

  std::mutex mutex;
  std::unordered_map<std::string, const Instance*> instances;
};

Registry& registry() {
  static Registry registry;
  return registry;
}

}  // namespace

const Instance& find_instance(const std::string& name) {
  std::lock_guard lock(registry().mutex);
  const auto found = registry().instances.find(name);
  if (found == registry().instances.end()) {
    throw std::runtime_error("ffpa_attn: no kernel named " + name +
                             " is loaded; `python -m ffpa_attn.doctor` lists those of this installation");
  }
  return *found->second;
}

}  // namespace ffpa

const char* ffpa_load_kernel(const char* path, const char* spec, const char* name) {
  static thread_local std::string problem;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    problem = std::string("ffpa_attn: ") + dlerror();
    return problem.c_str();
  }
  const void* instance = dlsym(library, (std::string("ffpa_instance_") + spec).c_str());
  if (instance == nullptr) {
    problem = std::string("ffpa_attn: ") + path + " holds no kernel named " + spec;
    return problem.c_str();
  }
  std::lock_guard lock(ffpa::registry().mutex);
  ffpa::registry().instances[name] = static_cast<const ffpa::Instance*>(instance);
  return nullptr;
}
