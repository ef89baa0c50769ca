// Computes the gradient of sinks. A sink joins the denominator of every row of its head and no numerator. With its
// share, P = exp(sink - LSE), and δ = dO·O - dLSE, a row's part of the gradient is -P δ. Where the other gradients are
// wanted, too, δ is kept for them: then O is read once.
//
// A block of threads has kSinkRows rows of a head, and leaves one sum; their sum is left to others, who add them in
// their order: every run gives the same bits. As many lanes share a row as its columns keep busy.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/backward/row_dot.cuh"
#include "attention/params/sink_gradient_params.h"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"

namespace ffpa {

// Fields has Dtype.
template <class Fields>
struct BackwardSinkGradientConfig : Fields {
  using Params = SinkGradientParams;
  static constexpr int kThreads = 256;

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape;
    shape.grid.x = uint32_t(params.heads * params.blocks_of_head());
    shape.threads = kThreads;
    shape.smem_bytes = kThreads / 32 * sizeof(float);
    return shape;
  }
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 4)
void backward_sink_gradient(FFPA_GRID_CONSTANT const SinkGradientParams params) {
  using Element = typename Config::Dtype;
  constexpr int kThreads = Config::kThreads;
  const int row_blocks = ceil_div(params.rows, kSinkRows);
  const int head = ptx::block_x() / params.blocks_of_head(), block_of_head = ptx::block_x() % params.blocks_of_head();
  const int batch = block_of_head / row_blocks, first_row = block_of_head % row_blocks * kSinkRows;
  const int64_t lse_row = (int64_t(batch) * params.heads + head) * params.rows;
  const float sink = float_from_bits(ptx::ld_global_4(params.sinks + head));

  int lanes = 32;  // those that share a row
  while (lanes > 1 && lanes / 2 * kLaneColumns >= params.columns) lanes /= 2;
  const int thread = ptx::thread_x(), lane = thread % lanes, rows_at_a_time = kThreads / lanes;

  float sum = 0;
  FFPA_NO_UNROLL
  for (int first = 0; first < kSinkRows; first += rows_at_a_time) {
    const int row_of_block = first + thread / lanes, row = first_row + row_of_block;
    const bool exists = row_of_block < kSinkRows && row < params.rows;
    const float lse = exists ? float_from_bits(ptx::ld_global_4(params.lse + lse_row + row)) : kInfinity;
    const float log_of_p = sink > lse ? 0 : sink - lse;  // more than 0 would come from roundings
    const bool sees_keys = std::fabs(lse) != kInfinity;  // else the row may hold anything
    const float p = sees_keys ? ptx::ex2(log_of_p * kLog2e) : 0.0f;
    const bool is_read = p != 0 || (sees_keys && params.delta != nullptr);
    float delta = dot_of_rows<Element>(row_of(params.out, batch, head, row), row_of(params.grad_out, batch, head, row),
                                       is_read ? params.columns : 0, lane, lanes);
    if (is_read && params.grad_lse != nullptr)
      delta -= float_from_bits(ptx::ld_global_4(params.grad_lse + lse_row + row));
    if (lane == 0 && p != 0) sum -= p * delta;
    if (lane == 0 && exists && params.delta != nullptr) {
      ptx::st_global_4(params.delta + lse_row + row, float_bits(delta));
    }
  }

  FFPA_UNROLL
  for (int distance = 16; distance > 0; distance /= 2) sum += ptx::shfl_xor(sum, distance);
  const uint32_t sums_smem = ptx::dynamic_smem();
  if (thread % 32 == 0) ptx::st_shared_4(sums_smem + thread / 32 * 4, float_bits(sum));
  ptx::sync_block();
  if (thread > 0) return;
  sum = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) sum += float_from_bits(ptx::ld_shared_4(sums_smem + warp * 4));
  ptx::st_global_4(params.partial + ptx::block_x(), float_bits(sum));
}

}  // namespace ffpa
