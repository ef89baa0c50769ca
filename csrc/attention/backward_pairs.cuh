// What is left to do for P and dS once the tensor cores have given scores and dP of some (row, key) pairs, whatever
// kind of instruction they ran.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "attention/backward_params.h"
#include "attention/backward_tiles.cuh"
#include "attention/logits.cuh"
#include "attention/score_rules.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
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

// Whether raw products become exponents of P by one fused multiply-add: all pairs count, though a caller's LSE may say
// of rows that they see no key (it is infinite then), nothing else happens to scores, and none is large. The same for
// all lanes.
FFPA_DEVICE bool is_plain(const AttentionParams& attention, bool all_seen, const float (&lse2)[2]) {
  const bool all_small = ptx::vote_all(std::fabs(lse2[0]) <= kMostFusedLogit && std::fabs(lse2[1]) <= kMostFusedLogit);
  return all_seen && all_small && attention.mask.kind == MaskKind::kNone && !(attention.softcap > 0);
}

// Scores of pairs from their raw products, by all rules, in place; and, with a softcap, its slopes where they lie. Of
// 16 rows and kN fragments of keys; `row` and `key` are where the first of them lie. Packed is all as [fragment][half
// of rows], a pair of keys each. Gives the factor that makes them logits: 1 where large ones had to become logits.
template <class Element, class Fragments = tile::AdjacentFragments, class Block, int kN>
FFPA_DEVICE float apply_rules(float (&scores)[1][kN][4], const AttentionParams& attention, const Block& rows,
                              bool all_seen, int row, int key, const float (&lse2)[2], int lane, uint32_t* slopes) {
  if (attention.softcap > 0) {
    FFPA_UNROLL
    for (int i = 0; i < kN * 2; ++i) {
      float slope[2];
      FFPA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const float t = tanh_of(ptx::mul_rn(scores[0][i / 2][i % 2 * 2 + e], attention.score_factor));
        slope[e] = 1 - t * t;
      }
      slopes[i] = ptx::pack<Element>(slope[0], slope[1]);
    }
  }
  products_to_scores<Fragments>(scores, attention, rows, all_seen, row, key, lane);
  const auto is_large = [&](int h) { return lse2[h] != kInfinity && !(std::fabs(lse2[h]) <= kMostFusedLogit); };
  const bool large = is_large(0) || is_large(1);
  FFPA_UNROLL
  for (int n = 0; n < kN; ++n) {
    FFPA_UNROLL
    for (int e = 0; e < 4; ++e) {
      float& score = scores[0][n][e];
      if (large) {
        // The LSE's own score, as near as rounding leaves it, has P = 1: where they are about 10^9 it moves them by 64.
        score = in_base_2(score);
        const float own = lse2[e / 2];
        if (is_large(e / 2) && score > own - std::fabs(own) * kRoundings) score = own;
      }
      if (lse2[e / 2] == kInfinity) score = -kInfinity;  // of a row that sees no key: it may be NaN
    }
  }
  return large ? 1.0f : kLog2e;
}

// P of pairs, packed, from what a factor makes logits.
template <class Element, int kN>
FFPA_DEVICE void finish_p(const float (&scores)[1][kN][4], float factor, const float (&lse2)[2], uint32_t* p) {
  FFPA_UNROLL
  for (int i = 0; i < kN * 2; ++i) {
    const float (&of_pair)[4] = scores[0][i / 2];
    p[i] = ptx::pack<Element>(ptx::ex2(of_pair[i % 2 * 2] * factor - lse2[i % 2]),
                              ptx::ex2(of_pair[i % 2 * 2 + 1] * factor - lse2[i % 2]));
  }
}

// Of packed numbers those where P is not 0: elsewhere they may be NaN.
FFPA_DEVICE uint32_t where_not_0(uint32_t p, uint32_t numbers) {
  return numbers & ((p & 0x0000ffff ? 0x0000ffff : 0) | (p & 0xffff0000 ? 0xffff0000 : 0));
}

template <class Element, int kCount>
FFPA_DEVICE void apply_slopes(uint32_t* p, const uint32_t (&slopes)[kCount]) {
  FFPA_UNROLL
  for (int i = 0; i < kCount; ++i) p[i] = ptx::multiply<Element>(p[i], where_not_0(p[i], slopes[i]));
}

// dS = P ∘ (dP - δ), packed. Where not all pairs count, dP may be NaN where P is 0.
template <class Element, int kN>
FFPA_DEVICE void finish_ds(const float (&dp)[1][kN][4], const uint32_t* p, bool all_count, const float (&delta)[2],
                           uint32_t* ds) {
  FFPA_UNROLL
  for (int i = 0; i < kN * 2; ++i) {
    const float (&of_pair)[4] = dp[0][i / 2];
    const float low = of_pair[i % 2 * 2] - delta[i % 2], high = of_pair[i % 2 * 2 + 1] - delta[i % 2];
    if constexpr (std::is_same_v<Element, Half>) {  // they may be more than it holds, where P is small
      float p_low, p_high;
      ptx::unpack<Half>(p[i], p_low, p_high);
      ds[i] = ptx::pack<Half>(p_low * low, p_high * high);
    } else {
      ds[i] = ptx::multiply<Element>(p[i], ptx::pack<Element>(low, high));
    }
  }
  if (all_count) return;
  FFPA_UNROLL
  for (int i = 0; i < kN * 2; ++i) ds[i] = where_not_0(p[i], ds[i]);
}

}  // namespace ffpa
