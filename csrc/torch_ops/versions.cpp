// The one operator of the library: it says which CUDA it was built with, and which the driver has.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <tuple>

namespace ffpa {
namespace {

// Returns the versions of the CUDA runtime linked in here and of the driver (0 where there is none): 13000 is 13.0.
std::tuple<int64_t, int64_t> cuda_versions() {
  int runtime = 0;
  int driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  return {runtime, driver};
}

STABLE_TORCH_LIBRARY_FRAGMENT(ffpa_attn_native, library) {
  library.def("cuda_versions() -> (int runtime, int driver)");
}

STABLE_TORCH_LIBRARY_IMPL(ffpa_attn_native, CompositeExplicitAutograd, library) {
  library.impl("cuda_versions", TORCH_BOX(&cuda_versions));
}

}  // namespace
}  // namespace ffpa
