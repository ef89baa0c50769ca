// Computes what the backward needs of each query row: its LSE as a logit (logits.cuh), δ = dO·O - dLSE unless the
// caller knows it, what P of a far row comes from (backward/row_shares.cuh), and whether it counts at all.
//
// dS = P ∘ (dP - δ): a gradient of the LSE adds dLSE · P to dS. A row that sees no key (its LSE is infinite) gets +inf
// for its LSE, which makes P 0; Q and dO of such a row may hold anything, so products leave it out (live_rows).
#pragma once

#include <cmath>

#include "attention/backward/row_dot.cuh"
#include "attention/backward/row_shares.cuh"
#include "attention/logits.cuh"
#include "attention/params/backward_params.h"
#include "attention/rows/packed_tiles.cuh"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"

namespace ffpa {

// Fields has Dtype.
template <class Fields>
struct BackwardRowsConfig : Fields {
  using Params = BackwardParams;
  static constexpr int kThreads = 128;
  static constexpr int kWarpRows = kLiveRows / (kThreads / 32);
  static_assert(kWarpRows == 16, "a warp writes two bytes of a word of live rows");

  static LaunchShape launch_shape(const Params& params) {
    return {{uint32_t(int64_t(params.all_heads()) * params.live_words())}, kThreads};
  }
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void backward_rows(FFPA_GRID_CONSTANT const BackwardParams params) {
  using Element = typename Config::Dtype;
  const AttentionParams& attention = params.attention;
  const int word_of_head = ptx::block_x() % params.live_words(), head_of_all = ptx::block_x() / params.live_words();
  const int head = head_of_all % attention.heads_q;
  int batch = head_of_all / attention.heads_q, word = word_of_head;  // word of the batch entry
  if (attention.is_packed()) {
    const PackedTile of_sequence = packed_tile(attention.packed_q, attention.batch, word_of_head, kLiveRows);
    batch = of_sequence.sequence;
    word = of_sequence.tile;
  }
  const BatchEntry entry = batch_entry(attention, batch);
  const int warp = ptx::thread_x() / 32, lane = ptx::lane_id();
  const int64_t lse_row = batch * attention.lse_batch_stride + head * attention.lse_head_stride + entry.q.begin;

  const int first_row = word * kLiveRows + warp * Config::kWarpRows;
  const RowTile rows = {entry, batch, head, first_row, min_of(first_row + Config::kWarpRows, entry.n_q()) - 1};
  const bool exists = first_row + lane <= rows.last;  // the row that the lane owns
  const auto own_number = [&](const float* numbers) {
    return float_from_bits(ptx::ld_global_4(numbers + lse_row + first_row + lane));
  };
  const float lse = exists ? own_number(attention.lse) : kInfinity;
  const bool sees_keys = std::fabs(lse) != kInfinity;
  // Rows behind a packed sequence belong to another one; behind the last row of a tensor copies find zeros.
  const uint32_t live = ptx::vote_ballot(sees_keys || !(exists || attention.is_packed()));

  float delta = 0;
  if (params.delta != nullptr) {
    if (sees_keys) delta = own_number(params.delta);
  } else {
    constexpr int kTogether = 4;  // rows that wait for memory together; the last one stands for those behind it
    for (int first = first_row; first <= rows.last; first += kTogether) {
      const uint16_t *out[kTogether], *grad_out[kTogether];
      FFPA_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        const int row = entry.q.begin + min_of(first + i, rows.last);
        out[i] = row_of(attention.out, batch, head, row);
        grad_out[i] = row_of(params.grad_out, batch, head, row);
      }
      float of_rows[kTogether];
      dots_of_rows<Element, kTogether>(of_rows, out, grad_out, attention.d_v, lane, 32);
      FFPA_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        if (first_row + lane == first + i && sees_keys) delta = of_rows[i];
      }
    }
    if (sees_keys && params.grad_lse != nullptr) delta -= own_number(params.grad_lse);
  }
  const float lse2 = sees_keys ? in_base_2(lse) : kInfinity;
  RowShare own;
  if (ptx::vote_any(is_far(lse2))) own = share_of_rows<Element>(attention, rows, sees_keys ? lse : kInfinity, lane);
  if (exists) {
    ptx::st_global_16(params.statistics + kRowStatistics * (lse_row + first_row + lane),
                      {float_bits(lse2), float_bits(delta), float_bits(own.share), float_bits(own.reference)});
  }
  uint64_t* words = params.live_rows + int64_t(head_of_all) * params.live_words();
  if (lane == 0) ptx::st_global_2(reinterpret_cast<uint16_t*>(words + word_of_head) + warp, uint16_t(live));
}

}  // namespace ffpa
