#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "attention/fp8_params.h"
#include "torch_ops/launch.h"
#include "torch_ops/tensors.h"

namespace ffpa {
namespace {

using torch::stable::Tensor;

ScaleView optional_scales(const std::optional<Tensor>& scales) {
  return scales ? scale_view(host_tensor(*scales)) : ScaleView{};
}

Fp8Output output_of(const Tensor& out) {
  using torch::headeronly::ScalarType;
  if (out.scalar_type() == ScalarType::Float) return Fp8Output::kFloat;
  return out.scalar_type() == ScalarType::Half ? Fp8Output::kHalf : Fp8Output::kBFloat16;
}

// q, k: pairs of 8-bit floats as elements of 16 bits; v: such pairs of the arranged V; scales [B, H, blocks] as fp8.py
// makes them; out: half, bfloat16 or float; lse: [B, H, N], or empty where none is wanted.
void fp8_forward(std::string kernel, const Tensor& q, const Tensor& k, const Tensor& v, std::optional<Tensor> q_scale,
                 std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, Tensor out, Tensor lse, double scale,
                 double softcap, int64_t left, int64_t right, bool top_left, Tensor scratch, int64_t resident_blocks) {
  float* lse_data = lse.numel() ? static_cast<float*>(lse.data_ptr()) : nullptr;
  launch_on(q, kernel,
            fp8_params(host_tensor(q), host_tensor(k), host_tensor(v), host_tensor(out), lse_data,
                       optional_scales(q_scale), optional_scales(k_scale), optional_scales(v_scale), output_of(out),
                       fp8_options(scale, softcap, left, right, top_left, static_cast<float*>(scratch.data_ptr()),
                                   resident_blocks)));
}

// Arranges V. v: bytes [B, H, N, D] in any strides; arranged: bytes [B, H, D, N up to a multiple of 128], contiguous.
void arrange_values(std::string kernel, const Tensor& v, Tensor arranged) {
  launch_on(v, kernel, arrange_params(host_tensor(v), host_tensor(arranged)));
}

STABLE_TORCH_LIBRARY_FRAGMENT(ffpa_attn_native, library) {
  library.def(
      "fp8_forward(str kernel, Tensor q, Tensor k, Tensor v, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, "
      "Tensor(a!) out, Tensor(b!) lse, float scale, float softcap, int left, int right, bool top_left, Tensor(c!) "
      "scratch, int resident_blocks) -> ()");
  library.def("arrange_values(str kernel, Tensor v, Tensor(a!) arranged) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ffpa_attn_native, CUDA, library) {
  library.impl("fp8_forward", TORCH_BOX(&fp8_forward));
  library.impl("arrange_values", TORCH_BOX(&arrange_values));
}

}  // namespace
}  // namespace ffpa
