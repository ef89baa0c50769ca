// Stands for the driver, the runtime and PyTorch beneath csrc/torch_ops/launch.cpp, where there is no GPU. A launch is
// written down with the bytes of its parameters; those of a TMA descriptor say what it was encoded from.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "launch/instance.h"

namespace {

std::map<CUfunction, std::vector<int>> takes;  // bytes of the parameters of each kernel
std::string heard;
CUresult answer = CUDA_SUCCESS;
bool is_old = false;
thread_local bool has_context = false;

template <class Number>
void append(std::string& text, Number number) {
  text.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* size,
                const cuuint64_t* stride, const cuuint32_t* box, const cuuint32_t* element_stride,
                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                CUtensorMapFloatOOBfill fill) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  if (reinterpret_cast<uintptr_t>(map) % 128 != 0) return CUDA_ERROR_MISALIGNED_ADDRESS;
  std::string text;
  append(text, address);
  for (int number : {int(type), int(rank), int(interleave), int(swizzle), int(promotion), int(fill)})
    append(text, number);
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (element_stride[i] != 1) return CUDA_ERROR_INVALID_VALUE;
    append(text, int(size[i]));
    append(text, int(box[i]));
    append(text, i + 1 < rank ? int(stride[i]) : 0);
  }
  text.resize(sizeof(CUtensorMap));
  std::memcpy(static_cast<void*>(map), text.data(), text.size());
  return CUDA_SUCCESS;
}

CUresult parameter_info(CUfunction function, size_t i, size_t* offset, size_t* bytes) {
  const std::vector<int>& sizes = takes[function];
  if (i >= sizes.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  *bytes = size_t(sizes[i]);
  return CUDA_SUCCESS;
}

CUresult launch(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                unsigned threads_z, unsigned smem, CUstream stream, void** parameters, void** extra) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  if (answer != CUDA_SUCCESS) return answer;
  append(heard, function);
  for (unsigned number : {x, y, z, threads, threads_y, threads_z, smem}) append(heard, number);
  append(heard, stream);
  append(heard, extra);
  for (int size : takes[function]) heard.append(static_cast<const char*>(*parameters++), size_t(size));
  return CUDA_SUCCESS;
}

int stream_of(int32_t device, void** stream) {
  *stream = reinterpret_cast<void*>(uintptr_t(1000 + device));
  return 0;
}

}  // namespace

const ffpa::InstanceTable ffpa::kBuiltInInstances{nullptr, 0};

extern "C" {

void* dlopen(const char* name, int) noexcept { return const_cast<char*>(name); }
void* dlsym(void*, const char*) noexcept { return reinterpret_cast<void*>(&stream_of); }
int aoti_torch_create_device_guard(int32_t, void** guard) { return *guard = nullptr, 0; }
int aoti_torch_delete_device_guard(void*) { return 0; }

cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaErrorUnknown; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return has_context = true, cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorLaunchOutOfResources ? "too much" : "?"; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const std::string wanted = name;
  *function = wanted == "cuTensorMapEncodeTiled" ? reinterpret_cast<void*>(&encode)
              : wanted == "cuFuncGetParamInfo"   ? reinterpret_cast<void*>(&parameter_info)
                                                 : reinterpret_cast<void*>(&launch);
  *found = is_old && version > 12030 ? cudaDriverEntryPointVersionNotSufficent : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

__attribute__((visibility("default"))) void a_kernel_takes(void* function, const int* bytes, int count) {
  takes[static_cast<CUfunction>(function)].assign(bytes, bytes + count);
}
__attribute__((visibility("default"))) void answers(int launches, bool old) {
  answer = static_cast<CUresult>(launches);
  is_old = old;
}
__attribute__((visibility("default"))) size_t what_was_heard(const char** text) {
  *text = heard.data();
  return heard.size();
}
}
