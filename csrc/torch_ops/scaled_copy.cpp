#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <string>

#include "attention/scaled_copy_params.h"
#include "torch_ops/launch.h"

namespace ffpa {
namespace {

using torch::stable::Tensor;

// `in` and `out` are contiguous, of one type and size.
void scaled_copy(std::string kernel, const Tensor& in, Tensor out, double scale) {
  if (in.numel() == 0) return;
  ScaledCopyParams params{in.data_ptr(), out.data_ptr(), in.numel(), static_cast<float>(scale)};
  launch_on(in, kernel, params);
}

STABLE_TORCH_LIBRARY_FRAGMENT(ffpa_attn_native, library) {
  library.def("scaled_copy(str kernel, Tensor input, Tensor(a!) out, float scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ffpa_attn_native, CUDA, library) { library.impl("scaled_copy", TORCH_BOX(&scaled_copy)); }

}  // namespace
}  // namespace ffpa
