// One result from those over parts of the keys (AttentionParams::partial): each weighs exp(its LSE - the LSE of all).
// The order of the sum is that of the keys, so bits do not change from run to run.
#pragma once

#include "attention/attention_params.h"
#include "attention/row_block.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/convert.cuh"
#include "ptx/launch_types.h"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace ffpa {

// Fields: Dtype, of the result.
template <class Fields>
struct MergeSplitsConfig : Fields {
  using Params = AttentionParams;
  static constexpr int kThreads = 128;
  static constexpr int kColumns = 4;  // of a thread at a time

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape;
    shape.grid.x = uint32_t(params.all_rows());
    shape.threads = kThreads;
    return shape;
  }
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void merge_splits(FFPA_GRID_CONSTANT const AttentionParams params) {
  const int64_t row_of_all = ptx::block_x();
  const int64_t row = row_of_all % params.n_q, head_of_all = row_of_all / params.n_q;
  const int64_t batch = head_of_all / params.heads_q, head = head_of_all % params.heads_q;
  const RowRange rows =
      params.is_packed() ? rows_of_sequence(params.packed_q, int(batch), params.n_q) : RowRange{0, params.n_q};
  if (rows.begin + row >= rows.end) return;

  const auto lse_of = [&](int split) {
    return float_from_bits(ptx::ld_global_4(params.partial_lse(split) + row_of_all));
  };
  float maximum = -kInfinity, sum = 0;
  for (int split = 0; split < params.splits; ++split) maximum = max_of(maximum, lse_of(split));
  const bool sees_keys = maximum > -kInfinity;
  for (int split = 0; sees_keys && split < params.splits; ++split) {
    sum += ptx::ex2((lse_of(split) - maximum) * kLog2e);
  }
  const float lse = maximum + ptx::lg2(sum) * kLn2;  // no key: -inf + -inf
  if (params.lse != nullptr && ptx::thread_x() == 0) {
    float* head_gmem = params.lse + batch * params.lse_batch_stride + head * params.lse_head_stride;
    ptx::st_global_4(head_gmem + rows.begin + row, float_bits(lse));
  }

  uint16_t* out_gmem = params.out.data + batch * params.out.batch_stride + head * params.out.head_stride +
                       (rows.begin + row) * params.out.row_stride;
  for (int column = ptx::thread_x() * Config::kColumns; column < params.d_v;
       column += Config::kThreads * Config::kColumns) {
    float out[4] = {0, 0, 0, 0};
    for (int split = 0; sees_keys && split < params.splits; ++split) {
      const float weight = ptx::ex2((lse_of(split) - lse) * kLog2e);
      uint32_t values[4];
      ptx::ld_global_16(values, params.partial_out(split) + row_of_all * params.d_v + column);
      FFPA_UNROLL
      for (int i = 0; i < 4; ++i) out[i] += weight * float_from_bits(values[i]);
    }
    using Element = typename Config::Dtype;
    ptx::st_global_8(out_gmem + column, {ptx::pack<Element>(out[0], out[1]), ptx::pack<Element>(out[2], out[3])});
  }
}

}  // namespace ffpa
