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
// to [B, H, N_q, N_k]; of packed sequences, tensors [H, T, D], lse [H, T], and the offsets [B + 1] in T; scratch and
// partial: see AttentionParams.
void attention_forward(std::string kernel, const Tensor& q, const Tensor& k, const Tensor& v, Tensor out, Tensor lse,
                       std::optional<Tensor> mask, std::optional<Tensor> offsets_q, std::optional<Tensor> offsets_k,
                       int64_t longest_q, int64_t longest_k, double scale, double softcap, int64_t left, int64_t right,
                       bool top_left, int64_t stages, int64_t value_stages, bool q_resident, bool grid_of_heads,
                       std::optional<Tensor> scratch, int64_t resident_blocks, int64_t splits,
                       std::optional<Tensor> partial) {
  float* lse_data = lse.numel() ? static_cast<float*>(lse.data_ptr()) : nullptr;
  const auto floats = [](const std::optional<Tensor>& x) { return x ? static_cast<float*>(x->data_ptr()) : nullptr; };
  HostSequences sequences;
  if (offsets_q) {
    sequences = {static_cast<const int32_t*>(offsets_q->data_ptr()), static_cast<const int32_t*>(offsets_k->data_ptr()),
                 offsets_q->size(0) - 1, longest_q, longest_k};
  }
  launch_on(q, kernel,
            forward_params(host_tensor(q), host_tensor(k), host_tensor(v), host_tensor(out), lse_data, mask_view(mask),
                           sequences,
                           {scale, softcap, left, right, top_left, stages, value_stages, q_resident, grid_of_heads,
                            floats(scratch), int(resident_blocks), int(splits), floats(partial)}));
}

STABLE_TORCH_LIBRARY_FRAGMENT(ffpa_attn_native, library) {
  library.def(
      "attention_forward(str kernel, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, Tensor? mask, "
      "Tensor? offsets_q, Tensor? offsets_k, int longest_q, int longest_k, float scale, float softcap, int left, int "
      "right, bool top_left, int stages, int value_stages, bool q_resident, bool grid_of_heads, Tensor(c!)? scratch, "
      "int resident_blocks, int splits, Tensor(d!)? partial) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ffpa_attn_native, CUDA, library) {
  library.impl("attention_forward", TORCH_BOX(&attention_forward));
}

}  // namespace
}  // namespace ffpa
