// Merges the results over parts of the keys (AttentionParams::partial) into one: each part weighs as much as its P sums
// up to, relative to the largest reference. A block has a row, and 128 of its threads add O of 16 parts at most, in the
// order of the keys; what these groups of threads have is then added in the same order: every run gives the same bits.
#pragma once

#include "attention/logits.cuh"
#include "attention/params/attention_params.h"
#include "attention/row_state.cuh"
#include "attention/rows/row_tile.cuh"
#include "attention/score_rules.cuh"
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
  static constexpr int kGroupThreads = 128, kGroupParts = 16, kMostGroups = 4;  // 64 parts at most (row_tiles.py)
  static constexpr int kThreads = kMostGroups * kGroupThreads;
  static constexpr int kColumns = 4;  // columns of a thread at a time

  static int groups(const Params& params) { return ceil_div(params.splits, kGroupParts); }

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape;
    shape.grid.x = uint32_t(params.all_rows());
    shape.threads = uint32_t(groups(params) * kGroupThreads);
    shape.smem_bytes = uint32_t((groups(params) - 1) * kGroupThreads * kColumns * 4);
    shape.starts_early = true;
    return shape;
  }
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 2)
void forward_merge(FFPA_GRID_CONSTANT const AttentionParams params) {
  ptx::wait_for_earlier_kernels();
  const int64_t row_of_all = ptx::block_x();
  const int64_t row = row_of_all % params.n_q, head_of_all = row_of_all / params.n_q;
  const int64_t batch = head_of_all / params.heads_q, head = head_of_all % params.heads_q;
  const RowRange rows =
      params.is_packed() ? rows_of_sequence(params.packed_q, int(batch), params.n_q) : RowRange{0, params.n_q};
  if (rows.begin + row >= rows.end) return;

  constexpr int kPartsAtOnce = 8;
  static_assert(Config::kMostGroups * Config::kGroupParts == 64, "a lane knows two parts");
  constexpr int kPartsOfLane = Config::kMostGroups * Config::kGroupParts / 32;
  // Each lane knows the weights of two parts: what their P sum up to, relative to the largest reference of all.
  const int lane = ptx::lane_id();
  float references[kPartsOfLane], weights[kPartsOfLane], reference = -kInfinity, sum = 0;
  FFPA_UNROLL
  for (int i = 0; i < kPartsOfLane; ++i) {
    uint32_t bits[2] = {float_bits(-kInfinity), 0};
    if (lane + 32 * i < params.splits) ptx::ld_global_8(bits, params.partial_sums(lane + 32 * i) + 2 * row_of_all);
    references[i] = float_from_bits(bits[0]);
    weights[i] = float_from_bits(bits[1]);
    reference = larger_of(reference, references[i]);
  }
  FFPA_UNROLL
  for (int distance = 16; distance > 0; distance /= 2) {
    reference = larger_of(reference, ptx::shfl_xor(reference, distance));
  }
  FFPA_UNROLL
  for (int i = 0; i < kPartsOfLane; ++i) {
    weights[i] *= growth(references[i], reference);
    sum += weights[i];
  }
  FFPA_UNROLL
  for (int distance = 16; distance > 0; distance /= 2) sum += ptx::shfl_xor(sum, distance);
  if (params.lse != nullptr && ptx::thread_x() == 0) {
    float* head_gmem = params.lse + batch * params.lse_batch_stride + head * params.lse_head_stride;
    const float logit = reference + ptx::lg2(sum);  // -inf where the row sees no key
    const float lse = params.has_slopes ? score_of_logit(params, logit) : in_natural_units(logit);
    ptx::st_global_4(head_gmem + rows.begin + row, float_bits(lse));
  }
  FFPA_UNROLL
  for (float& weight : weights) weight *= sum == 0 ? 0 : 1 / sum;  // NaN stays NaN

  uint16_t* out_gmem = row_of(params.out, batch, head, rows.begin + row);
  constexpr int kColumnsOfGroup = Config::kGroupThreads * Config::kColumns;
  const int group = ptx::thread_x() / Config::kGroupThreads, thread = ptx::thread_x() % Config::kGroupThreads;
  const int groups = ceil_div(params.splits, Config::kGroupParts), first = group * Config::kGroupParts;
  const auto sums_smem = [&](int of_group) {
    return ptx::dynamic_smem() + ((of_group - 1) * Config::kGroupThreads + thread) * Config::kColumns * 4;
  };
  const int64_t part_stride = params.all_rows() * params.part_columns();
  const int columns = round_up(params.d_v, kColumnsOfGroup);  // all lanes run each shuffle
  for (int column = thread * Config::kColumns; column < columns; column += kColumnsOfGroup) {
    const float* part_gmem =
        params.partial_out(first) + row_of_all * params.part_columns() + min_of(column, params.d_v - Config::kColumns);
    float out[Config::kColumns] = {};
    FFPA_NO_UNROLL
    for (int split = first; split < min_of(first + Config::kGroupParts, params.splits); split += kPartsAtOnce) {
      uint32_t values[kPartsAtOnce][Config::kColumns];
      FFPA_UNROLL
      for (int i = 0; i < kPartsAtOnce; ++i) {  // all are on their way before the first is used
        if (split + i < params.splits) ptx::ld_global_16(values[i], part_gmem);
        part_gmem += part_stride;
      }
      FFPA_UNROLL
      for (int i = 0; i < kPartsAtOnce; ++i) {
        const float of_lane = split < 32 ? weights[0] : weights[1];
        const float share = float_from_bits(ptx::shfl_idx(float_bits(of_lane), (split + i) % 32));
        if (split + i >= params.splits || share == 0) continue;  // a part without keys has no O
        FFPA_UNROLL
        for (int c = 0; c < Config::kColumns; ++c) out[c] += share * float_from_bits(values[i][c]);
      }
    }
    if (groups > 1) {
      if (group > 0) {
        ptx::st_shared_16(sums_smem(group),
                          {float_bits(out[0]), float_bits(out[1]), float_bits(out[2]), float_bits(out[3])});
      }
      ptx::sync_block();
      for (int other = 1; group == 0 && other < groups; ++other) {
        uint32_t sums[Config::kColumns];
        ptx::ld_shared_16(sums, sums_smem(other));
        FFPA_UNROLL
        for (int c = 0; c < Config::kColumns; ++c) out[c] += float_from_bits(sums[c]);
      }
      ptx::sync_block();  // the next columns come where these sums lie
    }
    using Element = typename Config::Dtype;
    if (group > 0 || column >= params.d_v) continue;
    ptx::st_global_8(out_gmem + column, {ptx::pack<Element>(out[0], out[1]), ptx::pack<Element>(out[2], out[3])});
  }
}

}  // namespace ffpa
