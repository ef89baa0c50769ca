// What an attention kernel is told about a call: the same for every kernel and every compiler.
#pragma once

#include <cstdint>

#include "base/math.h"

namespace ffpa {

// [batch, heads, rows, columns] of 16-bit elements; columns are adjacent, strides count elements.
struct TensorView {
  uint16_t* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
};

enum class MaskKind : int { kNone, kBool, kHalf, kBFloat16, kFloat };  // bool: take part; the others are added

// [batch, heads, rows, keys]; strides count elements, and are 0 where all share one.
struct MaskView {
  const void* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
  int64_t key_stride;
  MaskKind kind;
};

struct AttentionParams {
  TensorView q;    // [batch, heads_q, n_q, d_qk]
  TensorView k;    // [batch, heads_q / group, n_k, d_qk]
  TensorView v;    // [batch, heads_q / group, n_k, d_v]
  TensorView out;  // [batch, heads_q, n_q, d_v]
  float* lse;      // [batch, heads_q, n_q], natural log, or null

  int batch;
  int heads_q;
  int group;  // query heads that share a key/value head
  int n_q;
  int n_k;
  int d_qk;
  int d_v;

  // Row r sees the keys from r + shift - left to r + shift + right that exist. A side that reaches every key from every
  // row, unbounded or not, comes as n_q + shift (left) or n_k - shift (right): sums stay below n_q + n_k and a tile.
  int shift;
  int left;
  int right;

  // What a raw score is multiplied with: scale / softcap, and without a softcap scale · log2(e), which gives the logit.
  float score_factor;
  float softcap;  // 0: none
  MaskView mask;  // [batch, heads_q, n_q, n_k]

  int stages;       // 1 … 4 buffers in the ring of K and V steps
  bool q_resident;  // Q stays in shared memory; otherwise its columns come along with those of K

  float* scratch;       // of kernels that stream O: a part for each block of the grid
  int resident_blocks;  // that the GPU runs at a time: the grid of such a kernel
};

// A tensor as a caller knows it, of up to four dims: [batch, heads, rows, columns], of which the first may be missing.
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

  // As a mask: whatever stride a dim of one element has, all share that element.
  MaskView mask(MaskKind kind) const {
    const auto stride = [&](int dim) { return sizes[dim] == 1 ? 0 : strides[dim]; };
    return {data, stride(0), stride(1), stride(2), stride(3), kind};
  }
};

struct ForwardOptions {
  double scale;
  double softcap;       // 0: none
  int64_t left, right;  // -1 is unbounded
  bool top_left;
  int64_t stages;
  bool q_resident;
  float* scratch;
  int resident_blocks;
};

inline float finite_float(double value) { return float(clamp(value, -double(kLargestFloat), double(kLargestFloat))); }

// The parameters of a forward call, for a launch on a GPU and in the emulator alike; sizes and strides are checked
// ones.
inline AttentionParams forward_params(const HostTensor& q, const HostTensor& k, const HostTensor& v,
                                      const HostTensor& out, float* lse, const MaskView& mask,
                                      const ForwardOptions& options) {
  AttentionParams params{};
  params.q = q.view();
  params.k = k.view();
  params.v = v.view();
  params.out = out.view();
  params.lse = lse;
  params.mask = mask;
  params.batch = int(q.sizes[0]);
  params.heads_q = int(q.sizes[1]);
  params.group = int(q.sizes[1] / k.sizes[1]);
  params.n_q = int(q.sizes[2]);
  params.n_k = int(k.sizes[2]);
  params.d_qk = int(q.sizes[3]);
  params.d_v = int(v.sizes[3]);
  params.shift = options.top_left ? 0 : params.n_k - params.n_q;
  const auto side = [](int64_t given, int farthest) { return given < 0 || given > farthest ? farthest : int(given); };
  params.left = side(options.left, params.n_q + params.shift);
  params.right = side(options.right, params.n_k - params.shift);
  params.score_factor =
      finite_float(options.softcap > 0 ? options.scale / options.softcap : options.scale * 1.4426950408889634);
  // One too small for a float is still a cap.
  params.softcap = options.softcap > 0 ? max_of(finite_float(options.softcap), kSmallestFloat) : 0.0f;
  params.stages = int(options.stages);
  params.q_resident = options.q_resident;
  params.scratch = options.scratch;
  params.resident_blocks = options.resident_blocks;
  return params;
}

}  // namespace ffpa
