// Rows whose LSE, one float, cannot say how many keys share their largest score: of n keys at 10^9, or at the finfo.min
// of a mask, it is the score itself. By such an LSE each of them has P = 1. What P then adds up to is found here, and
// its logarithm, the row's share, goes into the exponents of P; it is 0 for all other rows.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/attention_params.h"
#include "attention/head_rows.cuh"
#include "attention/logits.cuh"
#include "attention/score_rules.cuh"
#include "attention/visible_keys.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"
#include "tile/fragments.cuh"

namespace ffpa {

// Of an LSE in base 2: the row has scores whose exponents the rounding of the LSE shows in.
FFPA_DEVICE bool is_far(float lse2) { return lse2 != kInfinity && !(std::fabs(lse2) <= kMostFusedLogit); }

// Of a far row, P's exponent is 0 at most, and 0 for scores that are its LSE's own, as near as rounding leaves it:
// where scores are about 10^9 it moves them by 64.
FFPA_DEVICE float exponent_of_far(float score, float lse) {
  const float above = score - lse;
  return above > -kRoundings * std::fabs(lse) ? 0.0f : above * kLog2e;
}

// Products q · k of 16 rows and the 8 keys from `key` on, straight from global memory. Rows and keys past the last ones
// repeat these.
template <class Element>
FFPA_DEVICE void multiply_from_gmem(float (&products)[4], const AttentionParams& params, const HeadRows& rows, int key,
                                    int lane) {
  const auto row_of = [&](const TensorView& x, int head, int row) {
    return x.data + rows.batch() * x.batch_stride + head * x.head_stride + row * x.row_stride;
  };
  const RowRange &q = rows.entry.q, &k = rows.entry.k;
  const int row = rows.first + tile::a_coordinate(lane, 0).row;
  const uint16_t* a_rows[2];
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) a_rows[h] = row_of(params.q, rows.head(), q.begin + min_of(row + 8 * h, rows.last));
  const int b_row = min_of(key + tile::b_coordinate(lane, 0).column, rows.n_k() - 1);
  const uint16_t* b = row_of(params.k, rows.head() / params.group, k.begin + b_row);
  FFPA_NO_UNROLL
  for (int step = 0; step < params.d_qk; step += tile::kMmaK) {
    const auto pair = [&](const uint16_t* row_gmem, int half) {
      const int column = step + 8 * half;
      return column < params.d_qk ? ptx::ld_global_4(row_gmem + column + 2 * (lane % 4)) : 0u;
    };
    const uint32_t a[4] = {pair(a_rows[0], 0), pair(a_rows[1], 0), pair(a_rows[0], 1), pair(a_rows[1], 1)};
    ptx::mma_m16n8k16_f32<Element>(products, a, pair(b, 0), pair(b, 1));
  }
}

// The share of row rows.first + lane, for lanes below 16, whose LSE in base 2 is `lse2`; of at most 16 rows. By all
// lanes.
template <class Element>
FFPA_DEVICE float shares_of_rows(const AttentionParams& params, const HeadRows& rows, float lse2, int lane) {
  float lse2_of[2], totals[2] = {0, 0};  // of the rows that the lane's fragments hold
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) lse2_of[h] = ptx::shfl_idx(lse2, tile::c_coordinate(lane, 2 * h).row);
  FFPA_NO_UNROLL
  for (int key = visible_keys_begin(rows); key < visible_keys_end(rows); key += tile::kMmaN) {
    float scores[1][1][4] = {};
    multiply_from_gmem<Element>(scores[0][0], params, rows, key, lane);
    products_to_scores(scores, params, rows, false, rows.first, key, lane);
    FFPA_UNROLL
    for (int e = 0; e < 4; ++e) {
      const float own = lse2_of[e / 2];
      if (is_far(own)) totals[e / 2] += ptx::ex2(exponent_of_far(scores[0][0][e], in_natural_units(own)));
    }
  }
  float shares[2];
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) {
    FFPA_UNROLL
    for (int distance = 1; distance < 4; distance *= 2) totals[h] += ptx::shfl_xor(totals[h], distance);
    shares[h] = totals[h] > 1 ? ptx::lg2(totals[h]) : 0.0f;  // less where the LSE is of keys that are elsewhere, too
  }
  const int source = lane % 8 * 4;  // the first lane that holds the row
  const float low = ptx::shfl_idx(shares[0], source), high = ptx::shfl_idx(shares[1], source);
  return lane < 8 ? low : high;
}

}  // namespace ffpa
