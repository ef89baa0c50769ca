// What is left to do for P and dS once the tensor cores have given scores and dP of some (row, key) pairs, whatever
// kind of instruction they ran.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "attention/backward_tiles.cuh"
#include "attention/score_rules.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/fragments.cuh"

namespace ffpa {

// Of rows row + lane / 4 and 8 further, rows of the head.
template <class Block>
FFPA_DEVICE void load_statistics(const BackwardParams& params, const Block& rows, int row, int lane, float (&lse2)[2],
                                 float (&delta)[2]) {
  const AttentionParams& attention = params.attention;
  const int64_t first =
      rows.batch() * attention.lse_batch_stride + rows.head() * attention.lse_head_stride + rows.q_begin();
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) {
    const int r = row + tile::c_coordinate(lane, 2 * h).row;
    uint32_t bits[2] = {float_bits(kInfinity), 0};  // a row that does not exist: P = 0
    if (r <= rows.last_row()) ptx::ld_global_8(bits, params.statistics + 2 * (first + r));
    lse2[h] = float_from_bits(bits[0]);
    delta[h] = float_from_bits(bits[1]);
  }
}

// P and dS of pairs that all see each other, without a mask and a softcap, packed as X is: [fragment][half of rows], a
// pair of keys each.
template <class Element, int kN>
FFPA_DEVICE void finish_plain_pairs(const float (&scores)[1][kN][4], const uint32_t* x, float score_factor,
                                    const float (&lse2)[2], uint32_t* p, uint32_t* ds) {
  FFPA_UNROLL
  for (int i = 0; i < kN * 2; ++i) {
    float x0, x1;
    ptx::unpack<Element>(x[i], x0, x1);
    const float p0 = ptx::ex2(scores[0][i / 2][i % 2 * 2] * score_factor - lse2[i % 2]);
    const float p1 = ptx::ex2(scores[0][i / 2][i % 2 * 2 + 1] * score_factor - lse2[i % 2]);
    p[i] = ptx::pack<Element>(p0, p1);
    ds[i] = ptx::pack<Element>(p0 * x0, p1 * x1);
  }
}

// The same by all rules, of 16 rows and kN fragments of keys, packed as X is: [fragment][half of rows], a pair of keys
// each. `row` and `key` are where the first of the scores lie.
template <class Element, class Fragments = tile::AdjacentFragments, class Block, int kN>
FFPA_DEVICE void finish_pairs(float (&scores)[1][kN][4], const uint32_t* x, const AttentionParams& attention,
                              const Block& rows, bool all_seen, int row, int key, const float (&lse2)[2], int lane,
                              uint32_t* p, uint32_t* ds) {
  float factors[kN][4];  // of dS = factor · P
  FFPA_UNROLL
  for (int n = 0; n < kN; ++n) {
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) ptx::unpack<Element>(x[n * 2 + h], factors[n][2 * h], factors[n][2 * h + 1]);
  }
  if (attention.softcap > 0) {  // the derivative of the cap
    FFPA_UNROLL
    for (int n = 0; n < kN; ++n) {
      FFPA_UNROLL
      for (int e = 0; e < 4; ++e) {
        const float t = tanh_of(scores[0][n][e] * attention.score_factor);
        factors[n][e] *= 1 - t * t;
      }
    }
  }
  scores_to_logits<Fragments>(scores, attention, rows, all_seen, row, key, lane);
  const bool rows_may_be_dead = !all_seen || attention.mask.kind != MaskKind::kNone;
  FFPA_UNROLL
  for (int n = 0; n < kN; ++n) {
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      float probability[2], gradient[2];
      FFPA_UNROLL
      for (int e = 0; e < 2; ++e) {
        // Where the pair does not count, S and X may be NaN.
        const float logit = rows_may_be_dead && lse2[h] == kInfinity ? -kInfinity : scores[0][n][2 * h + e];
        probability[e] = ptx::ex2(logit - lse2[h]);
        gradient[e] = probability[e] == 0 ? 0.0f : probability[e] * factors[n][2 * h + e];
      }
      p[2 * n + h] = ptx::pack<Element>(probability[0], probability[1]);
      ds[2 * n + h] = ptx::pack<Element>(gradient[0], gradient[1]);
    }
  }
}

}  // namespace ffpa
