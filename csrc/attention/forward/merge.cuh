// Merges the results over parts of the keys (AttentionParams::partial) into one: each part weighs as much as its P sums
// up to, relative to the largest reference. A warp has 128 columns of a row, and adds O of kWarpParts parts at most, in
// the order of the keys; where there are more, several warps share the columns, and what they have is added in the same
// order: every run gives the same bits.
#pragma once

#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "attention/softmax.cuh"
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
  static constexpr int kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kWarpParts = 8;  // they are all on their way before the first is used
  static constexpr int kColumns = 4;    // columns of a lane
  static constexpr int kWarpColumns = 32 * kColumns;
  static constexpr int kMostParts = kWarps * kWarpParts;  // as row_tiles.py has it

  // Returns how many warps share columns of a row: a power of two.
  static FFPA_HOST_DEVICE int sharing_warps(const Params& params) {
    int warps = 1;
    while (warps * kWarpParts < params.splits) warps *= 2;
    return warps;
  }

  static LaunchShape launch_shape(const Params& params) {
    const int64_t columns_of_all = params.all_rows() * ceil_div(params.d_v, kWarpColumns);
    LaunchShape shape;
    shape.grid.x = uint32_t(ceil_div(columns_of_all, int64_t{kWarps / sharing_warps(params)}));
    shape.threads = kThreads;
    shape.smem_bytes = sharing_warps(params) > 1 ? kThreads * kColumns * 4 : 0;
    shape.starts_early = true;
    return shape;
  }
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 4)
void forward_merge(FFPA_GRID_CONSTANT const AttentionParams params) {
  using Element = typename Config::Dtype;
  constexpr int kColumns = Config::kColumns, kWarpParts = Config::kWarpParts;
  ptx::wait_for_earlier_kernels();

  // ---- what this warp adds: parts from `first` on, of some columns of one row ----

  const int warp = ptx::thread_x() / 32, lane = ptx::lane_id();
  const int sharing = Config::sharing_warps(params), first = warp % sharing * kWarpParts;
  const uint32_t columns_of_row = ceil_div(params.d_v, Config::kWarpColumns);
  const uint32_t of_all = ptx::block_x() * (Config::kWarps / sharing) + warp / sharing;
  const uint32_t row_of_all = of_all / columns_of_row;
  const int column = int(of_all % columns_of_row) * Config::kWarpColumns + lane * kColumns;
  const int row = int(row_of_all % params.n_q), head_of_all = int(row_of_all / params.n_q);
  const int batch = head_of_all / params.heads_q, head = head_of_all % params.heads_q;
  bool exists = batch < params.batch;
  RowRange rows = {0, params.n_q};
  if (exists && params.is_packed()) rows = rows_of_sequence(params.packed_q, batch, params.n_q);
  exists = exists && rows.begin + row < rows.end;

  // ---- the weights of all parts, two of which a lane knows ----

  static_assert(Config::kMostParts == 64, "a lane knows two parts");
  float references[2], weights[2], reference = -kInfinity, sum = 0;
  FFPA_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int part = lane + 32 * i;
    uint32_t bits[2] = {float_bits(-kInfinity), 0};
    if (exists && part < params.splits) ptx::ld_global_8(bits, params.partial_sums(part) + 2 * row_of_all);
    references[i] = float_from_bits(bits[0]);
    weights[i] = float_from_bits(bits[1]);
    reference = larger_of(reference, references[i]);
  }
  const float* part_gmem =
      params.partial_out(first) + int64_t(row_of_all) * params.part_columns() + min_of(column, params.d_v - kColumns);
  uint32_t values[kWarpParts][kColumns];
  FFPA_UNROLL
  for (int i = 0; i < kWarpParts; ++i) {
    if (exists && first + i < params.splits) ptx::ld_global_16(values[i], part_gmem);
    part_gmem += params.all_rows() * params.part_columns();
  }
  FFPA_UNROLL
  for (int distance = 16; distance > 0; distance /= 2) {
    reference = larger_of(reference, ptx::shfl_xor(reference, distance));
  }
  FFPA_UNROLL
  for (int i = 0; i < 2; ++i) {
    weights[i] *= growth(references[i], reference);
    sum += weights[i];
  }
  FFPA_UNROLL
  for (int distance = 16; distance > 0; distance /= 2) sum += ptx::shfl_xor(sum, distance);
  const RowEnd end =
      end_row(sink_of(params, head), reference, sum, [&](float logit) { return score_of_logit(params, logit); });
  if (exists && params.lse != nullptr && first == 0 && column == 0) {
    float* head_gmem = params.lse + batch * params.lse_batch_stride + head * params.lse_head_stride;
    ptx::st_global_4(head_gmem + rows.begin + row, float_bits(end.lse));
  }
  FFPA_UNROLL
  for (float& weight : weights) weight *= sum == 0 ? 0 : end.share / sum;  // NaN stays NaN

  // ---- O ----

  float out[kColumns] = {};
  FFPA_UNROLL
  for (int i = 0; i < kWarpParts; ++i) {
    const float share = ptx::shfl_idx(first < 32 ? weights[0] : weights[1], (first + i) % 32);
    if (first + i >= params.splits || share == 0) continue;  // a part without keys has no O
    FFPA_UNROLL
    for (int c = 0; c < kColumns; ++c) out[c] += share * float_from_bits(values[i][c]);
  }
  if (sharing > 1) {
    const uint32_t sums_smem = ptx::dynamic_smem() + ptx::thread_x() * kColumns * 4;
    ptx::st_shared_16(sums_smem, {float_bits(out[0]), float_bits(out[1]), float_bits(out[2]), float_bits(out[3])});
    ptx::sync_block();
    for (int other = 1; first == 0 && other < sharing; ++other) {
      uint32_t sums[kColumns];
      ptx::ld_shared_16(sums, sums_smem + other * 32 * kColumns * 4);
      FFPA_UNROLL
      for (int c = 0; c < kColumns; ++c) out[c] += float_from_bits(sums[c]);
    }
  }
  if (first > 0 || !exists || column >= params.d_v) return;
  uint16_t* out_gmem = row_of(params.out, batch, head, rows.begin + row);
  ptx::st_global_8(out_gmem + column, {ptx::pack<Element>(out[0], out[1]), ptx::pack<Element>(out[2], out[3])});
}

}  // namespace ffpa
