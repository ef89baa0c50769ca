// Merges the results over parts of the keys (AttentionParams::partial) into one: each part weighs as much as its P sums
// up to, relative to the largest reference. Parts are added in the order of the keys: every run gives the same bits.
#pragma once

#include "attention/logits.cuh"
#include "attention/params/attention_params.h"
#include "attention/row_state.cuh"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"

namespace ffpa {

// Fields has Dtype, the type of the result.
template <class Fields>
struct ForwardMergeConfig : Fields {
  using Params = AttentionParams;
  static constexpr int kThreads = 128;
  static constexpr int kColumns = 4;  // columns of a thread at a time

  static LaunchShape launch_shape(const Params& params) { return {{uint32_t(params.all_rows())}, kThreads}; }
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void forward_merge(FFPA_GRID_CONSTANT const AttentionParams params) {
  const int64_t row_of_all = ptx::block_x();
  const int64_t row = row_of_all % params.n_q, head_of_all = row_of_all / params.n_q;
  const int64_t batch = head_of_all / params.heads_q, head = head_of_all % params.heads_q;
  const RowRange rows =
      params.is_packed() ? rows_of_sequence(params.packed_q, int(batch), params.n_q) : RowRange{0, params.n_q};
  if (rows.begin + row >= rows.end) return;

  struct Part {
    float reference, sum;  // reference in base 2; sum of P
  };
  const auto part = [&](int split) {
    uint32_t bits[2];
    ptx::ld_global_8(bits, params.partial_sums(split) + 2 * row_of_all);
    return Part{float_from_bits(bits[0]), float_from_bits(bits[1])};
  };
  float reference = -kInfinity, sum = 0;
  for (int split = 0; split < params.splits; ++split) reference = larger_of(reference, part(split).reference);
  const auto weight = [&](int split) {
    const Part x = part(split);
    return x.sum * growth(x.reference, reference);
  };
  for (int split = 0; split < params.splits; ++split) sum += weight(split);
  if (params.lse != nullptr && ptx::thread_x() == 0) {
    float* head_gmem = params.lse + batch * params.lse_batch_stride + head * params.lse_head_stride;
    const float lse = in_natural_units(reference + ptx::lg2(sum));  // -inf where the row sees no key
    ptx::st_global_4(head_gmem + rows.begin + row, float_bits(lse));
  }
  const float inverse = sum == 0 ? 0 : 1 / sum;  // NaN stays NaN

  uint16_t* out_gmem = row_of(params.out, batch, head, rows.begin + row);
  for (int column = ptx::thread_x() * Config::kColumns; column < params.d_v;
       column += Config::kThreads * Config::kColumns) {
    float out[4] = {0, 0, 0, 0};
    for (int split = 0; split < params.splits; ++split) {
      const float share = weight(split) * inverse;
      uint32_t values[4];
      ptx::ld_global_16(values, params.partial_out(split) + row_of_all * params.d_v + column);
      FFPA_UNROLL
      for (int i = 0; i < 4; ++i) out[i] += share * float_from_bits(values[i]);
    }
    using Element = typename Config::Dtype;
    ptx::st_global_8(out_gmem + column, {ptx::pack<Element>(out[0], out[1]), ptx::pack<Element>(out[2], out[3])});
  }
}

}  // namespace ffpa
