#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "attention/attention_params.h"
#include "torch_ops/launch.h"

namespace ffpa {
namespace {

using torch::stable::Tensor;

HostTensor host_tensor(const Tensor& x) { return {x.data_ptr(), int(x.dim()), x.sizes().data(), x.strides().data()}; }

MaskView mask_view(const std::optional<Tensor>& mask) {
  if (!mask) return {};
  using torch::headeronly::ScalarType;
  const auto kind = [](ScalarType type) {
    switch (type) {
      case ScalarType::Bool:
        return MaskKind::kBool;
      case ScalarType::Half:
        return MaskKind::kHalf;
      case ScalarType::BFloat16:
        return MaskKind::kBFloat16;
      case ScalarType::Float:
        return MaskKind::kFloat;
      default:
        throw std::invalid_argument("ffpa_attn: a mask of another type than ops.py lets through");
    }
  };
  return host_tensor(*mask).mask(kind(mask->scalar_type()));
}

// q, k, v, out: [B, H, N, D] as checked by ops.py; lse: [B, H, N], or empty where none is wanted; mask: broadcastable
// to [B, H, N_q, N_k]; scratch: of the kernels that stream O.
void attention_forward(std::string kernel, const Tensor& q, const Tensor& k, const Tensor& v, Tensor out, Tensor lse,
                       std::optional<Tensor> mask, double scale, double softcap, int64_t left, int64_t right,
                       bool top_left, int64_t stages, bool q_resident, std::optional<Tensor> scratch,
                       int64_t resident_blocks) {
  float* lse_data = lse.numel() ? static_cast<float*>(lse.data_ptr()) : nullptr;
  float* scratch_data = scratch ? static_cast<float*>(scratch->data_ptr()) : nullptr;
  launch_on(q, kernel,
            forward_params(host_tensor(q), host_tensor(k), host_tensor(v), host_tensor(out), lse_data, mask_view(mask),
                           {scale, softcap, left, right, top_left, stages, q_resident, scratch_data,
                            int(resident_blocks)}));
}

STABLE_TORCH_LIBRARY_FRAGMENT(ffpa_attn_native, library) {
  library.def(
      "attention_forward(str kernel, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, Tensor? mask, float "
      "scale, float softcap, int left, int right, bool top_left, int stages, bool q_resident, Tensor(c!)? scratch, "
      "int resident_blocks) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ffpa_attn_native, CUDA, library) {
  library.impl("attention_forward", TORCH_BOX(&attention_forward));
}

}  // namespace
}  // namespace ffpa
