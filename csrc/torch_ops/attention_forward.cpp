#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "attention/attention_params.h"
#include "torch_ops/launch.h"
#include "torch_ops/tensors.h"

namespace ffpa {
namespace {

using torch::stable::Tensor;

// q, k, v, out: [B, H, N, D] as checked by ops.py; lse: [B, H, N], or empty where none is wanted; mask: broadcastable
// to [B, H, N_q, N_k]; of packed sequences, tensors [H, T, D], lse [H, T], and the offsets [B + 1] in T; scratch,
// chunk_keys and partial: see AttentionParams.
void attention_forward(std::string kernel, const Tensor& q, const Tensor& k, const Tensor& v, Tensor out, Tensor lse,
                       std::optional<Tensor> mask, std::optional<Tensor> offsets_q, std::optional<Tensor> offsets_k,
                       int64_t longest_q, int64_t longest_k, double scale, double softcap, int64_t left, int64_t right,
                       bool top_left, int64_t stages, int64_t value_stages, bool q_resident, bool grid_of_heads,
                       int64_t chunk_keys, std::optional<Tensor> scratch, int64_t resident_blocks, int64_t splits,
                       std::optional<Tensor> partial) {
  float* lse_data = lse.numel() ? static_cast<float*>(lse.data_ptr()) : nullptr;
  launch_on(q, kernel,
            forward_params(host_tensor(q), host_tensor(k), host_tensor(v), host_tensor(out), lse_data, mask_view(mask),
                           sequences(offsets_q, offsets_k, longest_q, longest_k),
                           {scale, softcap, left, right, top_left, stages, value_stages, q_resident, grid_of_heads,
                            int(chunk_keys), optional_data<float>(scratch), int(resident_blocks), int(splits),
                            optional_data<float>(partial)}));
}

STABLE_TORCH_LIBRARY_FRAGMENT(ffpa_attn_native, library) {
  library.def(
      "attention_forward(str kernel, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, Tensor? mask, "
      "Tensor? offsets_q, Tensor? offsets_k, int longest_q, int longest_k, float scale, float softcap, int left, int "
      "right, bool top_left, int stages, int value_stages, bool q_resident, bool grid_of_heads, int chunk_keys, "
      "Tensor(c!)? scratch, int resident_blocks, int splits, Tensor(d!)? partial) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ffpa_attn_native, CUDA, library) {
  library.impl("attention_forward", TORCH_BOX(&attention_forward));
}

}  // namespace
}  // namespace ffpa
