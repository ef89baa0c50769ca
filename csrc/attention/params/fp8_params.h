// The parameters of the forward of 8-bit floats, beside those of any forward. TMA takes two such floats as one 16-bit
// element; d_qk, sizes and strides of Q, K and V count these elements. V is arranged: transposed, its keys in the order
// that P has (forward/wgmma_fp8.cuh), with zeros up to a multiple of 128 keys.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "base/compiler.h"

namespace ffpa {

inline constexpr int kScaledRows = 128;  // rows that share a scale

// The scales of a tensor [batch, heads, blocks of kScaledRows]; with null data, all are 1.
struct ScaleView {
  const float* data;
  int64_t batch_stride, head_stride, block_stride;
};

enum class Fp8Output : int { kHalf, kBFloat16, kFloat };

struct Fp8Params {
  AttentionParams attention;  // q, k [batch, heads, rows, d_qk / 2]; v [batch, heads, d_v, keys / 2]; out as ever
  ScaleView q_scale, k_scale, v_scale;
  Fp8Output output;
  int arranged_keys;  // keys of the arranged V, in pairs
};

// V as the caller gives it, [batch, heads, keys, columns] in any strides, and as the forward needs it.
struct ArrangeParams {
  const uint8_t* v;
  int64_t batch_stride, head_stride, key_stride, column_stride;
  bool words;  // 4 columns lie side by side, at a multiple of 4 bytes
  uint8_t* arranged;
  int batch, heads, keys, columns, arranged_keys;
};

}  // namespace ffpa
