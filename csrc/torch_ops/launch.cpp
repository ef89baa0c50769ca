// Finds, loads and launches kernels for Python, with PyTorch's device guard and current stream, and errors that say
// what was launched.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "attention/params/compiled_kernel.h"
#include "attention/params/kernel_launches.h"
#include "launch/instance.h"
#include "ptx/native/driver.h"

namespace ffpa {
namespace {

std::ostream& operator<<(std::ostream& text, const GridDim& dim) {
  return text << dim.x << " x " << dim.y << " x " << dim.z;
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  text << "ffpa_attn: ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

std::mutex instances_mutex;

// The instances by name: those built in, and those loaded since. Whoever looks holds the mutex.
std::unordered_map<std::string, const Instance*>& instances() {
  static std::unordered_map<std::string, const Instance*> known = [] {
    std::unordered_map<std::string, const Instance*> built_in;
    for (int i = 0; i < kBuiltInInstances.count; ++i) {
      const Instance* instance = kBuiltInInstances.instances[i];
      built_in[instance->name] = instance;
    }
    return built_in;
  }();
  return known;
}

const Instance* find_instance(const std::string& name) {
  std::lock_guard lock(instances_mutex);
  const auto found = instances().find(name);
  if (found == instances().end()) {
    fail("no kernel named ", name, " is loaded; `python -m ffpa_attn.doctor` lists those of this installation");
  }
  return found->second;
}

// Opens a library compiled on demand, which stays open, and registers its instance of `spec` under `name`.
void load_instance(const char* path, const std::string& spec, const char* name) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail(dlerror());
  const void* instance = dlsym(library, ("ffpa_instance_" + spec).c_str());
  if (instance == nullptr) fail(path, " holds no kernel named ", spec);
  std::lock_guard lock(instances_mutex);
  instances()[name] = static_cast<const Instance*>(instance);
}

// PyTorch's stable ABI declares this function but puts it into libtorch_cuda, which a CPU-only PyTorch does not have:
// linking it would tie the wheel to one of the two. Where there is a CUDA tensor the library is open already, though
// not in the global scope, so neither a weak symbol nor dlsym(RTLD_DEFAULT) finds it.
void* current_stream(int device) {
  using GetStream = int (*)(int32_t device, void** stream);
  static const GetStream get_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<GetStream>(symbol);
  }();
  void* stream = nullptr;
  if (get_stream == nullptr || get_stream(device, &stream) != 0) {
    fail("PyTorch's current CUDA stream is out of reach; is this PyTorch built for CUDA?");
  }
  return stream;
}

void launch(const Instance& instance, const void* params, int device, void* stream) {
  LaunchShape shape;
  const LaunchStatus status = instance.launch(params, device, stream, &shape);
  if (status.ok()) return;
  int most_smem = 0;
  cudaDeviceGetAttribute(&most_smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  fail("launching ", instance.name, " failed: ", status.message, "; grid ", shape.grid, ", cluster ", shape.cluster,
       ", ", shape.threads, " threads, ", shape.smem_bytes, " of ", most_smem, " bytes of shared memory, device ",
       device);
}

constexpr std::size_t kMostParamsBytes = 4096;  // as many as a kernel takes

// Launches all kernels, with `params` in place of those that Python described, unless it is null.
void launch_all(const KernelLaunches& of, const uint64_t* addresses, const uint8_t* params) {
  const std::size_t bytes = of.params_bytes;
  const auto instance = [&](int i) -> const Instance& { return *reinterpret_cast<const Instance*>(of.kernel[i]); };
  for (int i = 0; i < of.kernels; ++i) {
    if (bytes == instance(i).params_bytes && bytes <= kMostParamsBytes) continue;
    fail(instance(i).name, " takes ", instance(i).params_bytes, " bytes of parameters, and got ", bytes,
         ": its library was built from other sources; install ffpa-cuda again");
  }
  const torch::stable::accelerator::DeviceGuard guard(of.device);
  void* stream = current_stream(of.device);
  if (params == nullptr) params = of.params;
  for (int i = 0; i < of.kernels; ++i, params += bytes) {
    alignas(16) uint8_t filled[kMostParamsBytes];
    std::memcpy(filled, params, bytes);
    for (int j = 0; j < of.addresses; ++j) std::memcpy(filled + of.place[j], &addresses[j], sizeof(*addresses));
    launch(instance(i), filled, of.device, stream);
  }
}

// ---- kernels that Triton compiled ----

constexpr int kMostParameters = 128;
constexpr int kMostImageBytes = 4096;

// Throws where the kernel's parameters are not as many, or not of the sizes, that Python took from Triton. Triton has
// just launched it here, so the thread has a context.
void check(const CompiledKernel& kernel) {
  const auto refuse = [&](const auto&... why) { fail(kernel.name, " cannot be launched from here: ", why...); };
  if (kernel.parameters > kMostParameters || kernel.image_bytes > kMostImageBytes) refuse("it has too many parameters");
  const auto function = static_cast<CUfunction>(kernel.function);
  std::size_t offset = 0, bytes = 0;
  for (int i = 0; i < kernel.parameters; ++i) {
    const LaunchStatus status = ptx::parameter_info.once(function, std::size_t(i), &offset, &bytes);
    if (!status.ok()) refuse("of a parameter the driver says: ", status.message);
    if (bytes != std::size_t(kernel.bytes[i])) {
      refuse("parameter ", i, " has ", bytes, " bytes, not ", kernel.bytes[i]);
    }
  }
  if (ptx::parameter_info.once(function, std::size_t(kernel.parameters), &offset, &bytes).ok()) {
    refuse("it has more than ", kernel.parameters, " parameters");
  }
}

// Launches the kernel as Triton does: the driver lays parameters out itself, from a pointer to each.
LaunchStatus launch_compiled(const CompiledKernel& kernel, const uint64_t* tensors, void* stream) {
  alignas(128) unsigned char image[kMostImageBytes];
  std::memcpy(image, kernel.image, kernel.image_bytes);
  const auto address_of = [&](const AddressParameter& of) { return tensors[of.tensor] + of.offset; };
  for (int i = 0; i < kernel.addresses; ++i) {
    const uint64_t address = address_of(kernel.address[i]);
    std::memcpy(image + kernel.address[i].place, &address, sizeof(address));
  }
  constexpr cuuint32_t kEachElement[] = {1, 1, 1, 1, 1};
  for (int i = 0; i < kernel.maps; ++i) {
    const MapParameter& map = kernel.map[i];
    const LaunchStatus status = ptx::encode_tiled(
        reinterpret_cast<CUtensorMap*>(image + map.base.place), static_cast<CUtensorMapDataType>(map.type), map.rank,
        reinterpret_cast<void*>(address_of(map.base)), map.size, map.stride_bytes, map.box, kEachElement,
        CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(map.swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status.code > 0) return {status.code, "cuTensorMapEncodeTiled refused a tensor map"};
    if (!status.ok()) return status;
  }
  void* parameters[kMostParameters];
  for (int i = 0; i < kernel.parameters; ++i) parameters[i] = image + kernel.place[i];
  return ptx::launch_function(static_cast<CUfunction>(kernel.function), kernel.programs, 1, 1, kernel.threads, 1, 1,
                              kernel.smem_bytes, static_cast<CUstream>(stream), parameters, nullptr);
}

void launch_all_compiled(const CompiledKernel* kernels, int count, const uint64_t* tensors, int device) {
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = current_stream(device);
  for (int i = 0; i < count; ++i) {
    const LaunchStatus status = launch_compiled(kernels[i], tensors, stream);
    if (status.ok()) continue;
    fail("launching Triton's ", kernels[i].name, " failed: ", status.message, "; grid ", kernels[i].programs, ", ",
         kernels[i].threads, " threads, ", kernels[i].smem_bytes, " bytes of shared memory, device ", device);
  }
}

// Calls `does`, and returns null, or a message that the thread must read before its next call.
template <class Function>
const char* problem_of(const Function& does) {
  static thread_local std::string problem;
  try {
    does();
  } catch (const std::exception& error) {
    problem = error.what();
    return problem.c_str();
  }
  return nullptr;
}

}  // namespace
}  // namespace ffpa

// These functions are no operators: programs that come with a model can call every operator there is, and here they
// would write wherever they like.
#define FFPA_FOR_PYTHON extern "C" __attribute__((visibility("default"))) const char*

// Opens a library compiled on demand, and registers its instance of `spec` under `name`.
FFPA_FOR_PYTHON ffpa_load_kernel(const char* path, const char* spec, const char* name) {
  return ffpa::problem_of([&] { ffpa::load_instance(path, spec, name); });
}

// Finds the kernel of this name, loaded with this library or since.
FFPA_FOR_PYTHON ffpa_find_kernel(const char* name, const void** kernel) {
  return ffpa::problem_of([&] { *kernel = ffpa::find_instance(name); });
}

// Enqueues kernels, one after another, on PyTorch's current stream of their device; `params` may be null.
FFPA_FOR_PYTHON ffpa_launch(const ffpa::KernelLaunches* kernels, const uint64_t* addresses, const uint8_t* params) {
  return ffpa::problem_of([&] { ffpa::launch_all(*kernels, addresses, params); });
}

// Says whether kernels that Triton compiled take the parameters that Python describes.
FFPA_FOR_PYTHON ffpa_check_compiled(const ffpa::CompiledKernel* kernels, int count) {
  return ffpa::problem_of([&] { std::for_each(kernels, kernels + count, ffpa::check); });
}

// Enqueues such kernels, one after another, on PyTorch's current stream of `device`. `tensors` are addresses.
FFPA_FOR_PYTHON ffpa_launch_compiled(const ffpa::CompiledKernel* kernels, int count, const uint64_t* tensors,
                                     int device) {
  return ffpa::problem_of([&] { ffpa::launch_all_compiled(kernels, count, tensors, device); });
}
