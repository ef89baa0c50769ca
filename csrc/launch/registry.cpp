#include "launch/registry.h"

#include <dlfcn.h>

#include <mutex>
#include <stdexcept>
#include <unordered_map>

namespace ffpa {
namespace {

class Registry {
 public:
  Registry() {
    for (int i = 0; i < kBuiltInInstances.count; ++i) {
      const Instance* instance = kBuiltInInstances.instances[i];
      instances_[instance->name] = instance;
    }
  }

  const Instance* find(const std::string& name) {
    std::lock_guard lock(mutex_);
    const auto found = instances_.find(name);
    return found == instances_.end() ? nullptr : found->second;
  }

  void add(const std::string& name, const Instance* instance) {
    std::lock_guard lock(mutex_);
    instances_[name] = instance;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, const Instance*> instances_;
};

Registry& registry() {
  static Registry registry;
  return registry;
}

}  // namespace

const Instance& find_instance(const std::string& name) {
  const Instance* instance = registry().find(name);
  if (instance == nullptr) {
    throw std::runtime_error("ffpa_attn: no kernel named " + name +
                             " is loaded; `python -m ffpa_attn.doctor` lists those of this installation");
  }
  return *instance;
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
  ffpa::registry().add(name, static_cast<const ffpa::Instance*>(instance));
  return nullptr;
}
