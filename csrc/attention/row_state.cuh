// The softmax of a row over one tile of keys after another: the reference that P is relative to, and the sum of P.
//
// The reference m is an integer that follows the row's maximum only when that exceeds it by more than kLazyGrowth: what
// was computed with an older reference is mended by a power of two, which is exact.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "attention/score_rules.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "tile/fragment_output.cuh"
#include "tile/fragments.cuh"

namespace ffpa {

FFPA_DEVICE float finite_reference(float reference) { return reference == -kInfinity ? 0.0f : reference; }

// Returns the factor that turns what was computed with the reference `then` into what the later `now` would give.
FFPA_DEVICE float growth(float then, float now) { return ptx::ex2(then - finite_reference(now)); }

// State of the two rows a lane owns (r and r + 8).
struct RowState {
  // P̃ stays below 2^8, far from what 16 bits hold: its precision is relative, and no row sum or product overflows.
  static constexpr float kLazyGrowth = 8.0f;

  float reference[2] = {-kInfinity, -kInfinity};  // -inf: the row has seen no key
  float sum[2] = {0, 0};                          // sum of P over the thread's keys, relative to the reference

  // Lets the reference follow the maximum of a tile, and the sum the reference. Says whether O so far has another one.
  FFPA_DEVICE bool follow(int h, float maximum, float lazy_growth = kLazyGrowth) {
    const float before = reference[h];
    if (maximum - before > lazy_growth) reference[h] = std::ceil(maximum);
    sum[h] *= growth(before, reference[h]);
    return before != -kInfinity && reference[h] != before;
  }
};

// Returns what O of row `i` of the tile is to be multiplied with; `sum` is the whole sum of the row. The thread with
// `writes` set writes the row's LSE, or its sum where this is a part of the keys; score(logit) turns the logit into
// natural units.
template <class Score>
FFPA_DEVICE float finish_row(const AttentionParams& params, const SharedRowTile& rows, int i, float reference,
                             float sum, bool writes, const Score& score) {
  const RowPlace at = rows.place(i);
  if (writes && at.row <= rows.last) {
    if (params.splits > 1) {
      float* sums = params.partial_sums(rows.split()) + 2 * params.row_of_all(rows.batch(), at.head, at.row);
      ptx::st_global_8(sums, {float_bits(reference), float_bits(sum)});
    } else if (params.lse != nullptr) {
      float* lse = params.lse + rows.batch() * params.lse_batch_stride + at.head * params.lse_head_stride +
                   rows.entry.q.begin + at.row;
      const float logit = reference + ptx::lg2(sum);  // -inf where the row sees no key
      ptx::st_global_4(lse, float_bits(score(logit)));
    }
  }
  return sum > 0 ? 1 / sum : 0.0f;
}

// Writes the LSE of a warp's 16 rows, from row `row` of the tile on, and replaces their sums by the factors that O is
// to be multiplied with.
FFPA_DEVICE void finish_rows(const AttentionParams& params, const SharedRowTile& rows, int row, RowState& state,
                             int lane) {
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) {
    const int i = row + tile::c_coordinate(lane, 2 * h).row;
    state.sum[h] = finish_row(params, rows, i, state.reference[h], tile::sum_of_lanes(state.sum[h]), lane % 4 == 0,
                              [&](float logit) { return score_of_logit(params, logit); });
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
