// The parameters of an attention call, the same for every kernel and every compiler.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "base/math.h"

namespace ffpa {

// A tensor [batch, heads, rows, columns] of 16-bit elements; columns are adjacent, strides count elements.
struct TensorView {
  uint16_t* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
};

// A bool mask says which keys take part; the other kinds are added to scores.
enum class MaskKind : int { kNone, kBool, kHalf, kBFloat16, kFloat };

// A mask [batch, heads, rows, keys]; strides count bytes, and are 0 in dims where all share an element.
struct MaskView {
  const uint8_t* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
  int64_t key_stride;
  MaskKind kind;
};

// The places of a packed tensor's sequences: sequence i has the rows offsets[i] to offsets[i + 1]. Only the device
// reads them.
struct PackedRows {
  const int32_t* offsets;  // [batch + 1]; null: the tensor is not packed
  int total;               // rows of the tensor
};

struct AttentionParams {
  // Packed sequences are batch entries whose n_q and n_k are their own; the tensors then have no batch dimension.
  TensorView q;    // [batch, heads_q, n_q, d_qk]
  TensorView k;    // [batch, heads_q / group, n_k, d_qk]
  TensorView v;    // [batch, heads_q / group, n_k, d_v]
  TensorView out;  // [batch, heads_q, n_q, d_v]
  float* lse;      // [batch, heads_q, n_q], natural log, or null
  int64_t lse_batch_stride;
  int64_t lse_head_stride;
  PackedRows packed_q;
  PackedRows packed_k;

  int batch;
  int heads_q;
  int group;  // query heads that share a key/value head
  int n_q;    // rows of each batch entry, or of the longest packed sequence
  int n_k;
  int d_qk;
  int d_v;

  // Row r sees the keys from `left` before to `right` after its diagonal; -1 is unbounded.
  int left;
  int right;
  bool top_left;  // the diagonal is key r, otherwise r + n_k - n_q

  // The factor of a raw score: scale / softcap, or, without a softcap, scale · log2(e), which gives the logit.
  float score_factor;
  float scale;    // turns a raw score into one in natural units
  float softcap;  // 0 means no softcap
  MaskView mask;  // [batch, heads_q, n_q, n_k]

  int stages;          // 1 … 4 slots in the ring of K and V steps
  int value_stages;    // slots in the ring of V steps, where they have a ring of their own
  bool q_resident;     // Q stays in shared memory; otherwise its columns come along with those of K
  bool grid_of_heads;  // a grid (work items of a head, heads, batch) instead of one dim; the items are the same

  // The scratch of kernels that stream O or P has a part for each block; the parts of P follow a counter of all blocks.
  float* scratch;
  int resident_blocks;  // blocks that the GPU runs at a time: the grid of such a kernel
  int chunk_keys;       // keys of P that the scratch holds

  // Where few row blocks would leave the GPU idle, each part of the keys gets work items of its own. Their results are
  // merged afterwards: O [splits][batch · heads_q · n_q][d_v], and behind it (reference, sum of P) of each row
  // [splits][batch · heads_q · n_q][2]. An LSE in place of these two would round the weights.
  int splits;
  float* partial;

  FFPA_HOST_DEVICE bool has_rules() const { return softcap > 0 || mask.kind != MaskKind::kNone; }
  // Says whether scores may be so large that a float does not hold their logits, or be -inf by themselves.
  FFPA_HOST_DEVICE bool has_wide_mask() const {
    return mask.kind == MaskKind::kFloat || mask.kind == MaskKind::kBFloat16;
  }
  FFPA_HOST_DEVICE bool is_packed() const { return packed_q.offsets != nullptr; }
  FFPA_HOST_DEVICE int64_t all_rows() const { return int64_t(batch) * heads_q * n_q; }
  FFPA_HOST_DEVICE float* partial_out(int split) const { return partial + split * all_rows() * d_v; }
  FFPA_HOST_DEVICE float* partial_sums(int split) const {
    return partial + (splits * int64_t(d_v) + 2 * split) * all_rows();
  }
};

// A tensor as a caller knows it, with up to four dims [batch, heads, rows, columns]; the first ones may be missing.
struct HostTensor {
  void* data;
  int64_t sizes[4] = {1, 1, 1, 1};
  int64_t strides[4] = {0, 0, 0, 0};

  HostTensor(void* data, int dims, const int64_t* given_sizes, const int64_t* given_strides) : data(data) {
    for (int dim = 0; dim < dims; ++dim) {
      sizes[4 - dims + dim] = given_sizes[dim];
      strides[4 - dims + dim] = given_strides[dim];
    }
  }

  TensorView view() const { return {static_cast<uint16_t*>(data), strides[0], strides[1], strides[2]}; }

  // Returns the tensor as a mask. In a dim of size one all share its element, whatever the stride is.
  MaskView mask(MaskKind kind) const {
    const int bytes = kind == MaskKind::kBool ? 1 : kind == MaskKind::kFloat ? 4 : 2;
    const auto stride = [&](int dim) { return sizes[dim] == 1 ? 0 : strides[dim] * bytes; };
    return {static_cast<const uint8_t*>(data), stride(0), stride(1), stride(2), stride(3), kind};
  }
};

// The packed sequences of a call, as a caller knows them.
struct HostSequences {
  const int32_t* offsets_q = nullptr;  // on the device, [count + 1]
  const int32_t* offsets_k = nullptr;
  int64_t count = 0;
  int64_t longest_q = 0;
  int64_t longest_k = 0;
};

struct ForwardOptions {
  double scale;
  double softcap;       // 0 means no softcap
  int64_t left, right;  // -1 is unbounded
  bool top_left;
  int64_t stages;
  int64_t value_stages;
  bool q_resident;
  bool grid_of_heads;
  int chunk_keys;
  float* scratch;
  int resident_blocks;
  int splits;
  float* partial;
};

inline float finite_float(double value) { return float(clamp(value, -double(kLargestFloat), double(kLargestFloat))); }

// Makes the parameters of a forward call from checked sizes and strides, for GPU launches and the emulator alike.
inline AttentionParams forward_params(const HostTensor& q, const HostTensor& k, const HostTensor& v,
                                      const HostTensor& out, float* lse, const MaskView& mask,
                                      const HostSequences& sequences, const ForwardOptions& options) {
  AttentionParams params{};
  params.q = q.view();
  params.k = k.view();
  params.v = v.view();
  params.out = out.view();
  params.lse = lse;
  params.mask = mask;
  const bool packed = sequences.offsets_q != nullptr;
  const auto to_int = [](int64_t value) { return int(min_of(value, int64_t{kLargestInt})); };
  params.batch = int(packed ? sequences.count : q.sizes[0]);
  params.heads_q = int(q.sizes[1]);
  params.group = int(q.sizes[1] / k.sizes[1]);
  params.n_q = to_int(packed ? min_of(sequences.longest_q, q.sizes[2]) : q.sizes[2]);
  params.n_k = to_int(packed ? min_of(sequences.longest_k, k.sizes[2]) : k.sizes[2]);
  params.packed_q = {sequences.offsets_q, to_int(q.sizes[2])};
  params.packed_k = {sequences.offsets_k, to_int(k.sizes[2])};
  params.lse_head_stride = q.sizes[2];
  params.lse_batch_stride = packed ? 0 : q.sizes[1] * q.sizes[2];
  params.d_qk = int(q.sizes[3]);
  params.d_v = int(v.sizes[3]);
  params.left = to_int(options.left);
  params.right = to_int(options.right);
  params.top_left = options.top_left;
  params.score_factor =
      finite_float(options.softcap > 0 ? options.scale / options.softcap : options.scale * 1.4426950408889634);
  params.scale = finite_float(options.scale);
  // A softcap too small for a float is still a cap.
  params.softcap = options.softcap > 0 ? max_of(finite_float(options.softcap), kSmallestFloat) : 0.0f;
  params.stages = int(options.stages);
  params.value_stages = int(options.value_stages);
  params.q_resident = options.q_resident;
  params.grid_of_heads = options.grid_of_heads;
  params.chunk_keys = options.chunk_keys;
  params.scratch = options.scratch;
  params.resident_blocks = options.resident_blocks;
  params.splits = options.splits;
  params.partial = options.partial;
  return params;
}

}  // namespace ffpa
