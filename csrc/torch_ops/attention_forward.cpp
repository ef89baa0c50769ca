#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "attention/attention_params.h"
#include "torch_ops/launch.h"
#include "torch_ops/tensors.h"

namespace ffpa {
namespace {

using torch::stable::Tensor;

// The numbers that calls of one kind have in common: `Numbers` in ffpa_attn/launching/forward_call.py, packed.
struct Numbers {
  int64_t longest_q, longest_k;
  double scale, softcap;
  int64_t left, right, top_left, stages, value_stages, q_resident, grid_of_heads, chunk_keys, resident_blocks, splits;
};

// q, k, v, out: [B, H, N, D] as checked by ops.py; lse: [B, H, N], or empty where none is wanted; mask: broadcastable
// to [B, H, N_q, N_k]. Packed sequences have tensors [H, T, D], lse [H, T], and the offsets [B + 1] in T.
// AttentionParams describes scratch and partial.
void attention_forward(std::string kernel, const Tensor& packed, const Tensor& q, const Tensor& k, const Tensor& v,
                       Tensor out, Tensor lse, std::optional<Tensor> mask, std::optional<Tensor> offsets_q,
                       std::optional<Tensor> offsets_k, std::optional<Tensor> scratch, std::optional<Tensor> partial) {
  if (packed.numel() != sizeof(Numbers)) throw std::invalid_argument("ffpa_attn: numbers of another version");
  const Numbers& x = *static_cast<const Numbers*>(packed.data_ptr());
  float* lse_data = lse.numel() ? static_cast<float*>(lse.data_ptr()) : nullptr;
  launch_on(q, kernel,
            forward_params(host_tensor(q), host_tensor(k), host_tensor(v), host_tensor(out), lse_data, mask_view(mask),
                           sequences(offsets_q, offsets_k, x.longest_q, x.longest_k),
                           {x.scale, x.softcap, x.left, x.right, x.top_left != 0, x.stages, x.value_stages,
                            x.q_resident != 0, x.grid_of_heads != 0, int(x.chunk_keys), optional_data<float>(scratch),
                            int(x.resident_blocks), int(x.splits), optional_data<float>(partial)}));
}

STABLE_TORCH_LIBRARY_FRAGMENT(ffpa_attn_native, library) {
  library.def(
      "attention_forward(str kernel, Tensor packed, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, "
      "Tensor? mask, Tensor? offsets_q, Tensor? offsets_k, Tensor(c!)? scratch, Tensor(d!)? partial) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ffpa_attn_native, CUDA, library) {
  library.impl("attention_forward", TORCH_BOX(&attention_forward));
}

}  // namespace
}  // namespace ffpa
