// The online softmax of all forwards: a row's state over one tile of keys after another, P, and what becomes of the
// state in the end.
//
// The state is the reference that P is relative to, and the sum of P. The reference follows the row's maximum only when
// that exceeds it by more than a lazy growth; what was computed with an older reference is mended. On mma.sync it is
// the largest logit itself, so that P of the largest is 1, without rounding. On wgmma it is that rounded up to an
// integer: 16-bit P that meets a larger reference in another block is lowered by a power of two, which is exact, and
// 8-bit P, whose reference follows at once, follows less often. In each tile
//
//   1. apply_rules     leaves products as they are, or makes scores of them;
//   2. follow          lets the reference follow the largest logit of the tile;
//   3. RowExponents    make P by one multiply-add and one exponential.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "attention/largest_score.cuh"
#include "attention/logits.cuh"
#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "attention/score_rules.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "tile/fragment_output.cuh"
#include "tile/fragments.cuh"

namespace ffpa {

// ---- logits ----

// Products, or scores, become exponents of P by one multiply-add that rounds once: x · slope - reference. That treats
// all keys alike whatever their size, but the reference has to be near the largest logit, x · factor, and floats beyond
// 2^27 are too far apart for it: at a score of 10^9 one rounding more is a factor of 2^64. So rows with logits that
// large have a power of two as slope, whose products are exact: scores are as far apart, so that P hardly depends on
// it. It is no smaller than the factor: logits stay in order.
struct Slopes {
  float factor, coarse;

  static constexpr float kMostFine = 0x1p27f;

  static FFPA_DEVICE Slopes of(float factor) {
    return {factor, float_from_bits((float_bits(factor) + 0x007fffff) & 0x7f800000)};
  }
  // Returns the slope of a row whose largest logit, or reference, is `logit`.
  FFPA_DEVICE float at(float logit) const { return std::fabs(logit) <= kMostFine ? factor : coarse; }
  FFPA_DEVICE float logit(float x) const { return x * at(x * factor); }
  // Returns a power of two; below the normal ones there is one that is needed.
  FFPA_DEVICE float inverse_of_coarse() const {
    return float_from_bits(uint32_t(max_of(0x7f000000 - int(float_bits(coarse)), 0x00400000)));
  }
};

// Returns the slopes of what apply_rules leaves: products; or scores; or, where a float does not hold their logits, the
// results of in_base_2.
FFPA_DEVICE Slopes slopes_of(const AttentionParams& params) {
  return are_raw(params) ? Slopes::of(params.score_factor) : params.has_wide_mask() ? Slopes{1, 1} : Slopes::of(kLog2e);
}

// Returns the score of a logit that these slopes have made.
FFPA_DEVICE float score_of_logit(const AttentionParams& params, float logit) {
  const Slopes slopes = slopes_of(params);
  if (params.has_wide_mask()) return in_natural_units(logit);
  if (std::fabs(logit) <= Slopes::kMostFine) return logit * kLn2;
  const float largest = logit * slopes.inverse_of_coarse();
  return are_raw(params) ? ptx::mul_rn(largest, params.scale) : largest;
}

// Turns products that are not plain into what slopes_of(params) are for.
template <Rules kRules, class Fragments = tile::AdjacentFragments, int kM, int kN, class Block,
          class Ahead = NoMaskAhead>
FFPA_DEVICE void apply_rules(float (&scores)[kM][kN][4], const AttentionParams& params, const Block& block,
                             bool all_seen, int row, int key, int lane, const Ahead& ahead = {}, int step = 0) {
  if (are_raw(params) && params.mask.kind == MaskKind::kNone) {  // a way of its own: edges of windows take it
    hide_unseen<Fragments>(scores, block, row, key, lane);
    return;
  }
  if (!are_raw(params)) scale_and_cap<kRules>(scores, params);
  mask_scores<Fragments, kRules, true>(scores, params, block, row, key, lane, ahead, step);
  if (!all_seen) hide_unseen<Fragments>(scores, block, row, key, lane);
  if (!params.has_wide_mask()) return;
  for_each_score(scores, [](float& score) { score = in_base_2(score); });
}

// ---- the state ----

FFPA_DEVICE float finite_reference(float reference) { return reference == -kInfinity ? 0.0f : reference; }

// Returns the factor that turns what was computed with the reference `then` into what the later `now` would give.
FFPA_DEVICE float growth(float then, float now) { return ptx::ex2(then - finite_reference(now)); }

// With this lazy growth P̃ stays below 2^8, far from what 16 bits hold: its precision is relative, and no row sum or
// product overflows. Sums of P V in f16 leave no room for it.
template <class AccPv = float>
inline constexpr float kLazyGrowth = std::is_same_v<AccPv, float> ? 8.0f : 0.0f;

// State of the two rows a lane owns (r and r + 8).
struct RowState {
  float reference[2] = {-kInfinity, -kInfinity};  // -inf: the row has seen no key
  float sum[2] = {0, 0};                          // sum of P over the thread's keys, relative to the reference
  float top = -kInfinity;                         // see keep_largest()

  // Keeps the largest of a tile in one of the two rows. Several lanes have the same rows, so `which` differs.
  FFPA_DEVICE void keep_largest(const float (&largest)[2], const AttentionParams& params, int which) {
    if (params.largest != nullptr) top = larger_of(top, which % 2 ? largest[1] : largest[0]);
  }
  // Says whether the reference is to follow this logit.
  FFPA_DEVICE bool lags(int h, float maximum, float lazy_growth = kLazyGrowth<>) const {
    return maximum - reference[h] > lazy_growth;
  }
  // Lets the reference follow the maximum of a tile, and the sum the reference. Says whether O so far has another one.
  FFPA_DEVICE bool follow(int h, float maximum, float lazy_growth = kLazyGrowth<>) {
    const float before = reference[h];
    if (lags(h, maximum, lazy_growth)) reference[h] = maximum;
    sum[h] *= growth(before, reference[h]);
    return before != -kInfinity && reference[h] != before;
  }
};

// Returns the score of what apply_rules has left.
FFPA_DEVICE float score_of(const AttentionParams& params, float x) {
  return are_raw(params) ? ptx::mul_rn(x, params.scale) : x;
}

// Tells of the largest scores of a warp's 16 rows, from row `row` of the tile on, if a call asks for them.
FFPA_DEVICE void tell_if_asked(const RowState& state, const AttentionParams& params, const SharedRowTile& rows,
                               int row) {
  if (params.largest == nullptr) return;
  const int lane = ptx::thread_x_anew() % 32;  // as a number that is kept, it would take a register
  tell_largest(score_of(params, state.top), params, rows, row + tile::c_coordinate(lane, lane % 2 * 2).row);
}

// ---- P ----

// Makes P of a row from what apply_rules has left.
struct RowExponents {
  float slope, reference;

  static FFPA_DEVICE RowExponents of(const Slopes& slopes, float reference) {
    return {slopes.at(finite_reference(reference)), finite_reference(reference)};
  }
  FFPA_DEVICE float p(float x) const { return ptx::ex2(std::fma(x, slope, -reference)); }
};

// Returns the largest of a thread's values of row h of fragments side by side, and of `largest`.
template <int kN>
FFPA_DEVICE float largest_of_thread(const float (&fragments)[kN][4], int h, float largest = -kInfinity) {
  FFPA_UNROLL
  for (int n = 0; n < kN; ++n) largest = larger_of(larger_of(largest, fragments[n][2 * h]), fragments[n][2 * h + 1]);
  return largest;
}

// The functions below take scores of a warp's 16 rows, kSteps · 8 kN keys side by side.

template <int kSteps, int kN>
FFPA_DEVICE float largest_of_row(const float (&scores)[kSteps][1][kN][4], int h) {
  float largest = -kInfinity;
  FFPA_UNROLL
  for (int step = 0; step < kSteps; ++step) largest = largest_of_thread(scores[step][0], h, largest);
  return tile::largest_of_lanes(largest);
}

template <int kSteps, int kN, class Function>
FFPA_DEVICE void for_each_of_row(float (&scores)[kSteps][1][kN][4], int h, const Function& function) {
  FFPA_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    FFPA_UNROLL
    for (int n = 0; n < kN; ++n) {
      function(scores[step][0][n][2 * h]);
      function(scores[step][0][n][2 * h + 1]);
    }
  }
}

// Turns raw products into P for the rows from `row` of the tile on; says whether O so far has another reference. With
// `kWhole` references are integers.
template <Rules kRules, bool kWhole = true, int kSteps, int kN, class Kept, class Ahead = NoMaskAhead>
FFPA_DEVICE bool to_probabilities(float (&scores)[kSteps][1][kN][4], const AttentionParams& params, const Kept& kept,
                                  int key, int row, RowState& state, int lane, const Ahead& ahead = {}) {
  const SharedRowTile rows = kept.get();
  const bool all_seen = all_rows_see(rows, key, kSteps * kN * 8);
  if (!are_plain(params, all_seen)) {
    FFPA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      apply_rules<kRules>(scores[step], params, rows, all_seen, row, key + step * kN * 8, lane, ahead, step);
    }
  }
  const Slopes slopes = slopes_of(params);
  float largest[2];
  bool moved = false;
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) {
    largest[h] = largest_of_row(scores, h);
    const float logit = slopes.logit(largest[h]);
    moved |= state.follow(h, kWhole ? std::ceil(logit) : logit);
    const RowExponents exponents = RowExponents::of(slopes, state.reference[h]);
    float sum = 0;
    for_each_of_row(scores, h, [&](float& score) {
      score = exponents.p(score);
      sum += score;
    });
    state.sum[h] += sum;
  }
  state.keep_largest(largest, params, lane);
  return moved;
}

// Does the same for 8-bit floats; `scale` turns their products into those of Q and K. P is 2^exponent where a row is at
// its reference, and no more: so references always follow the maximum, and logits are rounded before it is taken.
template <int kSteps, int kN>
FFPA_DEVICE void to_probabilities_of_8_bits(float (&scores)[kSteps][1][kN][4], const AttentionParams& params,
                                            const SharedRowTile& rows, int key, int row, RowState& state, int lane,
                                            float scale, float exponent) {
  const bool all_seen = all_rows_see(rows, key, kSteps * kN * 8);
  const float factor = params.score_factor * scale;
  FFPA_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    const int first_key = key + step * kN * 8;
    const auto multiply_by = [&](float x) {
      for_each_score(scores[step], [&](float& score) { score = ptx::mul_rn(score, x); });
    };
    if (params.softcap > 0) {
      scale_and_cap<Rules::kFast>(scores[step], params, scale);
      if (!all_seen) hide_unseen(scores[step], rows, row, first_key, lane);
      multiply_by(kLog2e);
    } else {
      multiply_by(factor);
      if (!all_seen) hide_unseen(scores[step], rows, row, first_key, lane);
    }
  }
  float largest[2];
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) {
    largest[h] = largest_of_row(scores, h);
    state.follow(h, std::ceil(largest[h]), 0.0f);
    const float reference = finite_reference(state.reference[h]);
    float sum = 0;
    for_each_of_row(scores, h, [&](float& logit) {
      const float below = logit - reference;  // before adding the exponent, which a large reference would swallow
      logit = ptx::ex2(below + exponent);
      sum += logit;
    });
    state.sum[h] += sum;
  }
  state.keep_largest(largest, params, lane);
}

// Packs P as A fragments of 16 keys each.
template <class Element, int kSteps, int kN>
FFPA_DEVICE void pack_probabilities(uint32_t (&p)[kSteps * kN / 2][4], const float (&scores)[kSteps][1][kN][4]) {
  FFPA_UNROLL
  for (int i = 0; i < kSteps * kN / 2; ++i) {
    const float (&fragments)[kN][4] = scores[i / (kN / 2)][0];
    tile::pack_c_pair_as_a<Element>(p[i], fragments[i % (kN / 2) * 2], fragments[i % (kN / 2) * 2 + 1]);
  }
}

// ---- results ----

// A row that has all its keys: the part that these have of its denominator, where a sink may have the rest; and its
// LSE.
struct RowEnd {
  float share, lse;
};

// Returns the sink of a query head, -inf where there are none.
FFPA_DEVICE float sink_of(const AttentionParams& params, int head) {
  return params.sinks == nullptr ? -kInfinity : float_from_bits(ptx::ld_global_4(params.sinks + head));
}
// Returns that of row `i` of a tile.
FFPA_DEVICE float sink_of(const AttentionParams& params, const SharedRowTile& rows, int i) {
  return sink_of(params, rows.place(i).head);
}

// Ends a row with this sink; `sum` is the sum of P, and score(logit) turns a logit into natural units. It has no
// branches: with them, ptxas spilled registers of O.
template <class Score>
FFPA_DEVICE RowEnd end_row(float sink, float reference, float sum, const Score& score) {
  const float log_of_sum = ptx::lg2(sum), logit = reference + log_of_sum;  // -inf where the row sees no key
  // The sink's part is 2^above that of the keys. Large references may be no logits in base 2, and differ as scores do.
  const bool is_logit = std::fabs(reference) <= Slopes::kMostFine;
  float above = is_logit ? std::fma(sink, kLog2e, -reference) : (sink - score(reference)) * kLog2e;
  above = sink == -kInfinity ? sink : above - log_of_sum;
  const float smaller = ptx::ex2(-std::fabs(above)), of_both = 1 + smaller, more = ptx::lg2(of_both);
  const float of_keys = score(logit + more), of_sink = sink + kLn2 * more;  // the sink itself where no key is seen
  return {(above > 0 ? smaller : 1) * ptx::rcp(of_both), above > 0 ? of_sink : of_keys};
}

// Returns what O of row `i` of the tile, whose sink is `sink`, is to be multiplied with; `sum` is the whole sum of the
// row, and `divisor` the sum of those P that O is made of. The thread with `writes` set writes the row's LSE, or, where
// these are not all of its keys, its sum.
template <class Score>
FFPA_DEVICE float finish_row(const AttentionParams& params, const SharedRowTile& rows, int i, float sink,
                             float reference, float sum, float divisor, bool writes, const Score& score) {
  const RowPlace at = rows.place(i);
  const float factor = divisor > 0 ? 1 / divisor : 0.0f;
  const bool exists = at.row <= rows.last;
  if (params.splits > 1) {
    if (writes && exists) {
      float* sums = params.partial_sums(rows.split()) + 2 * params.row_of_all(rows.batch(), at.head, at.row);
      ptx::st_global_8(sums, {float_bits(reference), float_bits(sum)});
    }
    return factor;
  }
  const RowEnd end = end_row(sink, reference, sum, score);
  if (writes && exists && params.lse != nullptr) {
    float* lse = params.lse + rows.batch() * params.lse_batch_stride + at.head * params.lse_head_stride +
                 rows.entry.q.begin + at.row;
    ptx::st_global_4(lse, float_bits(end.lse));
  }
  return factor * end.share;
}

// Does the same where slopes have made the logits.
FFPA_DEVICE float finish_row(const AttentionParams& params, const SharedRowTile& rows, int i, float sink,
                             float reference, float sum, bool writes) {
  return finish_row(params, rows, i, sink, reference, sum, sum, writes,
                    [&](float logit) { return score_of_logit(params, logit); });
}

// Writes the LSE of a warp's 16 rows, from row `row` of the tile on, tells of their largest scores, and replaces their
// sums by the factors that O is to be multiplied with.
FFPA_DEVICE void finish_rows(const AttentionParams& params, const SharedRowTile& rows, int row, RowState& state,
                             int lane) {
  tell_if_asked(state, params, rows, row);
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) {
    const int i = row + tile::c_coordinate(lane, 2 * h).row;
    state.sum[h] = finish_row(params, rows, i, sink_of(params, rows, i), state.reference[h],
                              tile::sum_of_lanes(state.sum[h]), lane % 4 == 0);
  }
}

// OutRows says where 16 rows of O, or of a part's O, lie, from row `first` of the tile and column `column` on.
struct OutRows {
  const AttentionParams& params;
  const SharedRowTile& rows;
  int first, column;

  FFPA_DEVICE bool has(int row) const { return rows.place(first + row).row <= rows.last; }
  template <class Number>
  FFPA_DEVICE Number* at(int row) const {
    const RowPlace place = rows.place(first + row);
    if constexpr (std::is_same<Number, float>::value) {
      return params.partial_out(rows.split()) +
             params.row_of_all(rows.batch(), place.head, place.row) * params.part_columns() + column;
    } else {
      return row_of(params.out, params.is_packed() ? 0 : rows.batch(), place.head, rows.entry.q.begin + place.row) +
             column;
    }
  }
};

// Returns the writer of these rows of O; with `kParts` those of a part's O, in fp32.
template <class Element, int kFragments, bool kParts = false>
FFPA_DEVICE tile::RowWriter<Element, kFragments, OutRows> out_writer(const AttentionParams& params,
                                                                     const SharedRowTile& rows, int row, int column,
                                                                     int lane) {
  return {{params, rows, row, column}, params.d_v - column, kParts, lane};
}

}  // namespace ffpa
