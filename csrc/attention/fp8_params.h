// The parameters of the forward of 8-bit floats, beside those of any forward. TMA takes two such floats as one 16-bit
// element; d_qk, sizes and strides of Q, K and V count these elements. V is arranged: transposed, its keys in the order
// that P has (forward_fp8.cuh), with zeros up to a multiple of 128 keys.
#pragma once

#include <cstdint>

#include "attention/attention_params.h"
#include "base/compiler.h"

namespace ffpa {

inline constexpr int kScaledRows = 128;  // rows that share a scale

// The scales of a tensor [batch, heads, blocks of kScaledRows]; with null data, all are 1.
struct ScaleView {
  const float* data;
  int64_t batch_stride, head_stride, block_stride;
};

// Makes the view of a tensor of scales [batch, heads, blocks].
inline ScaleView scale_view(const HostTensor& x) {
  return {static_cast<const float*>(x.data), x.strides[1], x.strides[2], x.strides[3]};
}

enum class Fp8Output : int { kHalf, kBFloat16, kFloat };

struct Fp8Params {
  AttentionParams attention;
  ScaleView q_scale, k_scale, v_scale;
  Fp8Output output;
  int arranged_keys;  // keys of the arranged V, in pairs
};

// Shapes: q, k [batch, heads, rows, d_qk / 2], v [batch, heads, d_v, keys / 2], out [batch, heads, rows, d_v].
inline Fp8Params fp8_params(const HostTensor& q, const HostTensor& k, const HostTensor& v, const HostTensor& out,
                            float* lse, const ScaleView& q_scale, const ScaleView& k_scale, const ScaleView& v_scale,
                            Fp8Output output, const ForwardOptions& options) {
  Fp8Params params{};
  params.attention = forward_params(q, k, v, out, lse, {}, {}, options);
  params.attention.d_v = int(out.sizes[3]);
  params.q_scale = q_scale;
  params.k_scale = k_scale;
  params.v_scale = v_scale;
  params.output = output;
  params.arranged_keys = int(v.sizes[3]);
  return params;
}

// V as the caller gives it, [batch, heads, keys, columns] in any strides, and as the forward needs it.
struct ArrangeParams {
  const uint8_t* v;
  int64_t batch_stride, head_stride, key_stride, column_stride;
  bool words;  // 4 columns lie side by side, at a multiple of 4 bytes
  uint8_t* arranged;
  int batch, heads, keys, columns, arranged_keys;
};

inline ArrangeParams arrange_params(const HostTensor& v, const HostTensor& arranged) {
  const bool strides_are_words = v.strides[0] % 4 == 0 && v.strides[1] % 4 == 0 && v.strides[2] % 4 == 0;
  return {static_cast<const uint8_t*>(v.data),
          v.strides[0],
          v.strides[1],
          v.strides[2],
          v.strides[3],
          v.strides[3] == 1 && strides_are_words && reinterpret_cast<uintptr_t>(v.data) % 4 == 0,
          static_cast<uint8_t*>(arranged.data),
          int(v.sizes[0]),
          int(v.sizes[1]),
          int(v.sizes[2]),
          int(v.sizes[3]),
          int(arranged.sizes[3])};
}

inline ForwardOptions fp8_options(double scale, double softcap, int64_t left, int64_t right, bool top_left,
                                  float* scratch, int64_t resident_blocks) {
  ForwardOptions options{};
  options.scale = scale;
  options.softcap = softcap;
  options.left = left;
  options.right = right;
  options.top_left = top_left;
  options.scratch = scratch;
  options.resident_blocks = int(resident_blocks);
  options.splits = 1;
  return options;
}

}  // namespace ffpa
