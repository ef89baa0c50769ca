// Computes P and dS once the tensor cores have given scores and dP of some (row, key) pairs, whatever kind of
// instruction they ran.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "attention/backward/row_shares.cuh"
#include "attention/backward/tiles.cuh"
#include "attention/params/backward_params.h"
#include "attention/score_rules.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "tile/fragments.cuh"

namespace ffpa {

// Calls function(half of rows, statistics) for row row + lane / 4 of the head and the one 8 further, where they exist.
template <class Block, class Function>
FFPA_DEVICE void for_statistics(const BackwardParams& params, const Block& rows, int row, int lane,
                                const Function& function) {
  const AttentionParams& attention = params.attention;
  const int64_t first =
      rows.batch() * attention.lse_batch_stride + rows.head() * attention.lse_head_stride + rows.q_begin();
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) {
    const int r = row + tile::c_coordinate(lane, 2 * h).row;
    if (r <= rows.last_row()) function(h, params.statistics + kRowStatistics * (first + r));
  }
}

template <class Block>
FFPA_DEVICE void load_statistics(const BackwardParams& params, const Block& rows, int row, int lane, float (&lse2)[2],
                                 float (&delta)[2]) {
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) {
    lse2[h] = kInfinity;  // makes P = 0 where the row does not exist
    delta[h] = 0;
  }
  for_statistics(params, rows, row, lane, [&](int h, const float* statistics) {
    uint32_t bits[2];
    ptx::ld_global_8(bits, statistics);
    lse2[h] = float_from_bits(bits[0]);
    delta[h] = float_from_bits(bits[1]);
  });
}

template <class Block>
FFPA_DEVICE void load_shares(const BackwardParams& params, const Block& rows, int row, int lane,
                             RowShare (&shares)[2]) {
  for_statistics(params, rows, row, lane, [&](int h, const float* statistics) {
    uint32_t bits[2];
    ptx::ld_global_8(bits, statistics + 2);
    shares[h] = {float_from_bits(bits[1]), float_from_bits(bits[0])};
  });
}

// Says whether no row is far. All lanes get the same answer.
FFPA_DEVICE bool none_far(const float (&lse2)[2]) { return !ptx::vote_any(is_far(lse2[0]) || is_far(lse2[1])); }

// Says whether raw products become exponents of P by one fused multiply-add, hidden pairs aside: nothing else happens
// to scores, and no row is far. All lanes get the same answer.
FFPA_DEVICE bool are_linear(const AttentionParams& attention, const float (&lse2)[2]) {
  return none_far(lse2) && !attention.has_rules();
}

// Says whether no row is blind: none lacks its keys, and each exists. All lanes get the same answer.
FFPA_DEVICE bool none_blind(const float (&lse2)[2]) {
  return ptx::vote_all(lse2[0] < kInfinity && lse2[1] < kInfinity);
}

// The slopes of a softcap are kept times this factor: halves below 2^-14 have fewer digits.
template <class Element>
inline constexpr float kSlopes = std::is_same_v<Element, Half> ? 0x1p15f : 1;

// Turns products, or scores, into linear exponents of P, in place: `factor` makes logits of them. Hidden pairs are for
// hide_pairs().
template <class Element, int kN>
FFPA_DEVICE void linear_exponents(float (&scores)[1][kN][4], float factor, const float (&lse2)[2]) {
  FFPA_UNROLL
  for (int n = 0; n < kN; ++n) {
    FFPA_UNROLL
    for (int e = 0; e < 4; ++e) scores[0][n][e] = scores[0][n][e] * factor - (lse2[e / 2] - kExponentOfP<Element>);
  }
}

// Does the same to raw products where there is a softcap and all scores are small; and writes its slopes to `slopes`.
// The bits are those of exponents_by_rules().
template <class Element, int kN>
FFPA_DEVICE void capped_exponents(float (&scores)[1][kN][4], const AttentionParams& attention, const float (&lse2)[2],
                                  uint32_t* slopes) {
  FFPA_UNROLL
  for (int i = 0; i < kN * 2; ++i) {
    float slopes_of_pair[2];
    FFPA_UNROLL
    for (int e = 0; e < 2; ++e) {
      float& score = scores[0][i / 2][i % 2 * 2 + e];
      const TanhAndSlope of_score = TanhAndSlope::of_small(ptx::mul_rn(score, attention.score_factor));
      score = of_score.tanh * attention.softcap * kLog2e - (lse2[i % 2] - kExponentOfP<Element>);
      slopes_of_pair[e] = of_score.slope * kSlopes<Element>;
    }
    slopes[i] = ptx::pack<Element>(slopes_of_pair[0], slopes_of_pair[1]);
  }
}

// Makes P of unseen pairs 0, and that of blind rows, whose exponents may be NaN.
template <class Fragments = tile::AdjacentFragments, class Block, int kN>
FFPA_DEVICE void hide_pairs(float (&exponents)[1][kN][4], const Block& rows, int row, int key, const float (&lse2)[2],
                            int lane) {
  hide_unseen<Fragments>(exponents, rows, row, key, lane);
  FFPA_UNROLL
  for (int i = 0; i < kN * 4; ++i) {
    if (lse2[i / 2 % 2] == kInfinity) exponents[0][i / 4][i % 4] = -kInfinity;
  }
}

// Turns raw products into scores before masks; and, with a softcap, writes its slopes to `slopes`.
template <class Element, int kN>
FFPA_DEVICE void cap_products(float (&scores)[1][kN][4], const AttentionParams& attention, uint32_t* slopes) {
  const bool has_softcap = attention.softcap > 0;
  const float factor = has_softcap ? attention.score_factor : attention.scale;
  FFPA_UNROLL
  for (int i = 0; i < kN * 4; ++i) scores[0][i / 4][i % 4] = ptx::mul_rn(scores[0][i / 4][i % 4], factor);
  if (!has_softcap) return;
  float rests[kN * 4];  // all wait for the same instructions together
  FFPA_UNROLL
  for (int i = 0; i < kN * 4; ++i) rests[i] = rest_of_tanh(scores[0][i / 4][i % 4]);
  FFPA_UNROLL
  for (int i = 0; i < kN * 2; ++i) {
    float (&pair)[2] = reinterpret_cast<float (&)[2]>(scores[0][i / 2][i % 2 * 2]);
    const TanhAndSlope low = TanhAndSlope::of(pair[0], rests[2 * i]),
                       high = TanhAndSlope::of(pair[1], rests[2 * i + 1]);
    pair[0] = low.tanh * attention.softcap;
    pair[1] = high.tanh * attention.softcap;
    slopes[i] = ptx::pack<Element>(low.slope * kSlopes<Element>, high.slope * kSlopes<Element>);
  }
}

// Turns raw products into exponents of P by all rules, in place; and, with a softcap, writes its slopes to `slopes`.
// The products are of 16 rows and kN fragments of keys; `row` and `key` are where the first of them lie. With
// `all_seen`, all rows see all keys, and none is blind. All packed values are [fragment][half of rows], a pair of keys
// each. get_shares(shares) gives those of far rows.
template <class Element, class Fragments = tile::AdjacentFragments, class Block, int kN, class GetShares>
FFPA_DEVICE void exponents_by_rules(float (&scores)[1][kN][4], const AttentionParams& attention, const Block& rows,
                                    bool all_seen, int row, int key, const float (&lse2)[2], int lane, uint32_t* slopes,
                                    const GetShares& get_shares) {
  cap_products<Element>(scores, attention, slopes);
  mask_scores<Fragments, Rules::kInFewRegisters, false>(scores, attention, rows, row, key, lane);
  const bool any_far = ptx::vote_any(is_far(lse2[0]) || is_far(lse2[1]));
  RowShare shares[2];
  if (any_far) get_shares(shares);
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) {
    const bool far = is_far(lse2[h]);
    const float reference = far ? shares[h].reference : 0.0f,
                least_own = far ? shares[h].least_of_reference() : kInfinity;
    const float rest = (far ? shares[h].share : lse2[h]) - kExponentOfP<Element>;
    FFPA_UNROLL
    for (int i = 0; i < kN * 2; ++i) {
      float& x = scores[0][i / 2][2 * h + i % 2];
      if (any_far) x = x > least_own ? 0.0f : x - reference;  // RowShare::exponent for far rows
      x = x * kLog2e - rest;
    }
  }
  if (!all_seen) hide_pairs<Fragments>(scores, rows, row, key, lse2, lane);
}

// Computes P of pairs, packed, from its exponents.
template <class Element, int kN>
FFPA_DEVICE void finish_p(const float (&exponents)[1][kN][4], uint32_t* p) {
  FFPA_UNROLL
  for (int i = 0; i < kN * 2; ++i) {
    const float (&of_pair)[2] = reinterpret_cast<const float (&)[2]>(exponents[0][i / 2][i % 2 * 2]);
    p[i] = ptx::pack<Element>(ptx::ex2(of_pair[0]), ptx::ex2(of_pair[1]));
  }
}

// Does the same, and adds P of each half of the rows to its sum.
template <class Element, int kN>
FFPA_DEVICE void finish_p(const float (&exponents)[1][kN][4], uint32_t* p, float (&sums)[2]) {
  FFPA_UNROLL
  for (int i = 0; i < kN * 2; ++i) {
    const float (&of_pair)[2] = reinterpret_cast<const float (&)[2]>(exponents[0][i / 2][i % 2 * 2]);
    const float low = ptx::ex2(of_pair[0]), high = ptx::ex2(of_pair[1]);
    sums[i % 2] += (low + high) * kUnitOfP<Element>;
    p[i] = ptx::pack<Element>(low, high);
  }
}

// Keeps those packed numbers where P is not 0 and clears the others, which may be NaN.
FFPA_DEVICE uint32_t where_not_0(uint32_t p, uint32_t numbers) {
  return numbers & ((p & 0x0000ffff ? 0x0000ffff : 0) | (p & 0xffff0000 ? 0xffff0000 : 0));
}

// Multiplies P by its slopes, which may be NaN where a pair does not count.
template <class Element, int kCount>
FFPA_DEVICE void apply_slopes(uint32_t* p, const uint32_t (&slopes)[kCount], bool all_count) {
  FFPA_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const uint32_t of_pair = all_count ? slopes[i] : where_not_0(p[i], slopes[i]);
    if constexpr (kSlopes<Element> == 1) {
      p[i] = ptx::multiply<Element>(p[i], of_pair);
    } else {
      float p_low, p_high, low, high;
      ptx::unpack<Element>(p[i], p_low, p_high);
      ptx::unpack<Element>(of_pair, low, high);
      p[i] = ptx::pack<Element>(p_low * (low / kSlopes<Element>), p_high * (high / kSlopes<Element>));
    }
  }
}

// Computes dS = P ∘ (dP - δ), packed, from P as it is stored. Where not all pairs count, dP may be NaN where P is 0.
template <class Element, int kN>
FFPA_DEVICE void finish_ds(const float (&dp)[1][kN][4], const uint32_t* p, bool all_count, const float (&delta)[2],
                           uint32_t* ds) {
  FFPA_UNROLL
  for (int i = 0; i < kN * 2; ++i) {
    const float (&of_pair)[4] = dp[0][i / 2];
    constexpr float kUnit = kUnitOfP<Element>;
    const float low = of_pair[i % 2 * 2] * kUnit - delta[i % 2] * kUnit;
    const float high = of_pair[i % 2 * 2 + 1] * kUnit - delta[i % 2] * kUnit;
    if constexpr (std::is_same_v<Element, Half>) {  // a small (dP - δ) · kUnit has few bits as a Half
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
