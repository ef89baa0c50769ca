// Launches kernels for Python, with PyTorch's device guard and current stream, and errors that say what was launched.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include <cstddef>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>

#include "launch/registry.h"

namespace ffpa {
namespace {

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
    throw std::runtime_error(
        "ffpa_attn: PyTorch's current CUDA stream is out of reach; is this PyTorch built for CUDA?");
  }
  return stream;
}

std::ostream& operator<<(std::ostream& text, const GridDim& dim) {
  return text << dim.x << " x " << dim.y << " x " << dim.z;
}

std::string describe_failure(const Instance& instance, const LaunchShape& shape, int device, const char* why) {
  int most_smem = 0;
  cudaDeviceGetAttribute(&most_smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  std::ostringstream text;
  text << "ffpa_attn: launching " << instance.name << " failed: " << why << "; grid " << shape.grid << ", cluster "
       << shape.cluster << ", " << shape.threads << " threads, " << shape.smem_bytes << " of " << most_smem
       << " bytes of shared memory, device " << device;
  return text.str();
}

void launch(const Instance& instance, const void* params, std::size_t params_bytes, int device) {
  if (params_bytes != instance.params_bytes) {
    throw std::runtime_error(std::string("ffpa_attn: ") + instance.name + " takes " +
                             std::to_string(instance.params_bytes) + " bytes of parameters, and got " +
                             std::to_string(params_bytes) +
                             ": its library was built from other sources; install ffpa-cuda again");
  }
  const torch::stable::accelerator::DeviceGuard guard(device);
  LaunchShape shape;
  const LaunchStatus status = instance.launch(params, device, current_stream(device), &shape);
  if (!status.ok()) throw std::runtime_error(describe_failure(instance, shape, device, status.message));
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

// Finds the kernel of this name, loaded with this library or since.
extern "C" __attribute__((visibility("default"))) const char* ffpa_find_kernel(const char* name, const void** kernel) {
  return ffpa::problem_of([&] { *kernel = &ffpa::find_instance(name); });
}

// Enqueues a kernel with its Config's Params on PyTorch's current stream of `device`.
extern "C" __attribute__((visibility("default"))) const char* ffpa_launch(const void* kernel, const void* params,
                                                                          std::size_t params_bytes, int device) {
  return ffpa::problem_of(
      [&] { ffpa::launch(*static_cast<const ffpa::Instance*>(kernel), params, params_bytes, device); });
}
