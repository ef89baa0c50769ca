#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "attention/backward_params.h"
#include "torch_ops/launch.h"
#include "torch_ops/tensors.h"

namespace ffpa {
namespace {

// Runs one kernel of the backward on one chunk. Tensors are those of attention_forward; all gradients have one type,
// that of q or float; statistics: [as lse][2]; live_rows: int64; p, ds: [rows of the workspace, keys].
void attention_backward(std::string kernel, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                        const Tensor& grad_out, const Tensor& lse, std::optional<Tensor> grad_lse,
                        std::optional<Tensor> mask, std::optional<Tensor> offsets_q, std::optional<Tensor> offsets_k,
                        int64_t longest_q, int64_t longest_k, double scale, double softcap, int64_t left, int64_t right,
                        bool top_left, int64_t resident_blocks, Tensor dq, Tensor dk, Tensor dv, Tensor statistics,
                        Tensor live_rows, Tensor p, Tensor ds, std::optional<Tensor> partial, int64_t first_entry,
                        int64_t entries, int64_t first_tile, int64_t end_tile, int64_t first_key, int64_t end_key,
                        int64_t turn) {
  const ForwardOptions options = backward_options(scale, softcap, left, right, top_left, resident_blocks);
  const BackwardTensors tensors = {host_tensor(q),        host_tensor(k),  host_tensor(v),  host_tensor(out),
                                   host_tensor(grad_out), host_tensor(dq), host_tensor(dk), host_tensor(dv)};
  const BackwardChunk chunk = {first_entry,
                               entries,
                               first_tile,
                               end_tile,
                               first_key,
                               end_key,
                               turn,
                               static_cast<uint16_t*>(p.data_ptr()),
                               static_cast<uint16_t*>(ds.data_ptr()),
                               optional_data<float>(partial)};
  launch_on(q, kernel,
            backward_params(tensors, static_cast<float*>(lse.data_ptr()), optional_data<float>(grad_lse),
                            mask_view(mask), sequences(offsets_q, offsets_k, longest_q, longest_k), options,
                            dq.element_size() == sizeof(float), static_cast<float*>(statistics.data_ptr()),
                            static_cast<uint64_t*>(live_rows.data_ptr()), chunk));
}

STABLE_TORCH_LIBRARY_FRAGMENT(ffpa_attn_native, library) {
  library.def(
      "attention_backward(str kernel, Tensor q, Tensor k, Tensor v, Tensor out, Tensor grad_out, Tensor lse, Tensor? "
      "grad_lse, Tensor? mask, Tensor? offsets_q, Tensor? offsets_k, int longest_q, int longest_k, float scale, float "
      "softcap, int left, int right, bool top_left, int resident_blocks, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, "
      "Tensor(d!) statistics, Tensor(e!) live_rows, Tensor(f!) p, Tensor(g!) ds, Tensor(h!)? partial, int first_entry, "
      "int entries, int first_tile, int end_tile, int first_key, int end_key, int turn) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ffpa_attn_native, CUDA, library) {
  library.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace
}  // namespace ffpa
