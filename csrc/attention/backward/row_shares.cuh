// The softmax of far rows: their scores are so large that rounding them, or an LSE in one float, shows in P, and that
// the LSE cannot say how many keys share the largest score: where n keys are at 10^9, or at the finfo.min of a mask, it
// is the score itself. So P of a far row comes from its largest score and the logarithm of its sum, which are found
// here.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "attention/score_rules.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "tile/fragments.cuh"

namespace ffpa {

// A multiply-add makes exponents of P where an LSE, in base 2, is no larger than this: the LSE's rounding then changes
// P by 2^-11 at most.
inline constexpr float kMostNearLse = 0x1p14f;

// Returns whether rounding shows in P of a row with this LSE, in base 2.
FFPA_DEVICE bool is_far(float lse2) { return lse2 != kInfinity && !(std::fabs(lse2) <= kMostNearLse); }

// Kernels of several kinds round scores and LSEs. An LSE counts as what its row's scores give, and a score as the
// largest of its row, where they are no further apart than this, relative to their size.
inline constexpr float kRoundingsOfLse = 0x1p-21f;
inline constexpr float kRoundingsOfScore = 0x1p-22f;

// The share of a far row: P = 2^(exponent(score) - share).
struct RowShare {
  float reference = 0, share = 0;

  // Scores that equal the reference, up to rounding, get exponent 0: rounding moves scores of about 10^9 by 64.
  FFPA_DEVICE float least_of_reference() const { return reference - std::fabs(reference) * kRoundingsOfScore; }
  FFPA_DEVICE float exponent(float score) const {
    return score > least_of_reference() ? 0.0f : (score - reference) * kLog2e;
  }
};

// Returns a row's share, from its largest score and the sum of P relative to that, if these give its LSE. Otherwise the
// LSE is the reference: it also covers keys that are elsewhere.
FFPA_DEVICE RowShare share_of_row(float largest, float sum, float lse) {
  const float share = ptx::lg2(sum), off = largest - lse + share * kLn2;
  return std::fabs(off) <= kRoundingsOfLse * std::fabs(lse) ? RowShare{largest, share} : RowShare{lse, 0};
}

// Adds the products q · k of 16 rows and the 8 keys from `key` on, straight from global memory. The last row and key
// take the place of those past them.
template <class Element>
FFPA_DEVICE void multiply_from_gmem(float (&products)[4], const AttentionParams& params, const RowTile& rows, int key,
                                    int lane) {
  const RowRange &q = rows.entry.q, &k = rows.entry.k;
  const int row = rows.first + tile::a_coordinate(lane, 0).row;
  const uint16_t* a_rows[2];
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h)
    a_rows[h] = row_of(params.q, rows.batch(), rows.head(), q.begin + min_of(row + 8 * h, rows.last));
  const int b_row = min_of(key + tile::b_coordinate(lane, 0).column, rows.n_k() - 1);
  const uint16_t* b = row_of(params.k, rows.batch(), rows.head() / params.group, k.begin + b_row);
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

// Calls function(score, half of rows) for all scores of at most 16 rows.
template <class Element, class Function>
FFPA_DEVICE void for_scores_of_rows(const AttentionParams& params, const RowTile& rows, int lane,
                                    const Function& function) {
  FFPA_NO_UNROLL
  for (int key = visible_keys_begin(rows); key < visible_keys_end(rows); key += tile::kMmaN) {
    float scores[1][1][4] = {};
    multiply_from_gmem<Element>(scores[0][0], params, rows, key, lane);
    products_to_scores(scores, params, rows, false, rows.first, key, lane);
    FFPA_UNROLL
    for (int e = 0; e < 4; ++e) function(scores[0][0][e], e / 2);
  }
}

// Gives a lane below 16 the share of row rows.first + lane, whose LSE is `lse`. All lanes call it, for 16 rows at most.
template <class Element>
FFPA_DEVICE RowShare share_of_rows(const AttentionParams& params, const RowTile& rows, float lse, int lane) {
  float largest[2] = {-kInfinity, -kInfinity}, sum[2] = {0, 0};  // for the rows that the lane's fragments hold
  for_scores_of_rows<Element>(params, rows, lane,
                              [&](float score, int h) { largest[h] = larger_of(largest[h], score); });
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) {
    FFPA_UNROLL
    for (int distance = 1; distance < 4; distance *= 2)
      largest[h] = larger_of(largest[h], ptx::shfl_xor(largest[h], distance));
  }
  for_scores_of_rows<Element>(params, rows, lane, [&](float score, int h) {
    if (score != -kInfinity) sum[h] += ptx::ex2(RowShare{largest[h]}.exponent(score));
  });
  float own_largest = 0, own_sum = 0;
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) {
    FFPA_UNROLL
    for (int distance = 1; distance < 4; distance *= 2) sum[h] += ptx::shfl_xor(sum[h], distance);
    const int source = lane % 8 * 4;  // the first lane that holds the row
    const float largest_of_row = ptx::shfl_idx(largest[h], source), sum_of_row = ptx::shfl_idx(sum[h], source);
    if (lane / 8 != h) continue;
    own_largest = largest_of_row;
    own_sum = sum_of_row;
  }
  return share_of_row(own_largest, own_sum, lse);
}

}  // namespace ffpa
