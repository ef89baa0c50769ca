// Moves O of the split-D forward: into scratch and back between tiles, 16 bytes of a fragment a lane; and, with the row
// sums, into out and LSE, or into the result of a part of the keys for forward_merge.
#pragma once

#include <cstdint>

#include "attention/forward/mma_split.cuh"
#include "attention/rows/item_grid.cuh"
#include "attention/rows/row_tile.cuh"
#include "attention/softmax.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "tile/e4m3_fragments.cuh"
#include "tile/fragments.cuh"

namespace ffpa {

template <class Config>
FFPA_DEVICE float* ForwardMmaSplit<Config>::scratch_of(int group) const {
  constexpr int kWarpFloats = kOutM * kOutN * 128;
  const int64_t warp_of_all = (int64_t(block_number()) * Config::column_groups(params_) + group) * Config::kWarps;
  return params_.scratch + (warp_of_all + thread_ / 32) * kWarpFloats + lane_ * 4;
}

template <class Config>
FFPA_DEVICE void ForwardMmaSplit<Config>::load(Out& out, int group) const {
  const float* from = scratch_of(group);
  FFPA_UNROLL
  for (int m = 0; m < kOutM; ++m) {
    FFPA_UNROLL
    for (int n = 0; n < kOutN; ++n) {
      uint32_t bits[4];
      ptx::ld_global_16(bits, from + (m * kOutN + n) * 128);
      out[m][n].set(
          {float_from_bits(bits[0]), float_from_bits(bits[1]), float_from_bits(bits[2]), float_from_bits(bits[3])});
    }
  }
}

template <class Config>
FFPA_DEVICE void ForwardMmaSplit<Config>::save(const Out& out, int group) const {
  float* to = scratch_of(group);
  FFPA_UNROLL
  for (int m = 0; m < kOutM; ++m) {
    FFPA_UNROLL
    for (int n = 0; n < kOutN; ++n) {
      float values[4];
      out[m][n].get(values);
      ptx::st_global_16(to + (m * kOutN + n) * 128,
                        {float_bits(values[0]), float_bits(values[1]), float_bits(values[2]), float_bits(values[3])});
    }
  }
}

// Leaves what O of each row is to be multiplied with in the place of the first warp's maxima; writes the LSE; and the
// blocks of the first columns tell of the largest scores.
template <class Config>
FFPA_DEVICE void ForwardMmaSplit<Config>::finish_rows() {
  tile::for_each_row<kScoreM>([&](int m, int h) { publish(m, h, tile::sum_of_lanes(states_[m].sum[h])); });
  sync_team();  // the sums of all warps are there
  const SharedRowTile rows = rows_.get();
  if (first_column_ == 0) {
    FFPA_UNROLL
    for (int m = 0; m < kScoreM; ++m) {
      tell_if_asked(states_[m], params_, rows, score_row() + m * 16);
    }
  }
  if (score_warp_by_keys() == 0) {
    tile::for_each_row<kScoreM>([&](int m, int h) {
      const int row = score_row(m, h);
      const bool writes = first_column_ == 0 && lane_ % 4 == 0;
      float factor =
          finish_row(params_, rows, row, sink_of(params_, rows, row), states_[m].reference[h], row_sum(row), writes);
      if constexpr (Config::kE4m3) factor *= value_scale_;
      ptx::sync_warp();  // all lanes have read the sums of these rows
      publish(m, h, factor);
    });
  }
  sync_team();  // the factors are there
}

template <class Config>
FFPA_DEVICE void ForwardMmaSplit<Config>::write(const Out& out, int first_column) const {
  if (params_.splits > 1) {
    write_as<true>(out, first_column);
  } else {
    write_as<false>(out, first_column);
  }
}

template <class Config>
template <bool kParts>
FFPA_DEVICE void ForwardMmaSplit<Config>::write_as(const Out& out, int first_column) const {
  const SharedRowTile rows = rows_.get();
  const auto column_of = [&](int n) { return pair_column(n / 2) + n % 2 * 8; };
  FFPA_UNROLL
  for (int m = 0; m < kOutM; ++m) {
    float inverse[2];
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) inverse[h] = statistic(partial_smem_, published_place(out_row(m, h), 0));
    auto writer = out_writer<Element, kOutN, kParts>(params_, rows, out_row_begin() + m * 16, first_column, lane_);
    FFPA_UNROLL
    for (int n = 0; n < kOutN; n += 2) {
      float values[2][4];
      FFPA_UNROLL
      for (int i = 0; i < 2; ++i) {
        out[m][n + i].get(values[i]);
        FFPA_UNROLL
        for (int e = 0; e < 4; ++e) values[i][e] *= inverse[e / 2];
      }
      if constexpr (Config::kE4m3) tile::to_adjacent(values[0], values[1], lane_);
      FFPA_UNROLL
      for (int i = 0; i < 2; ++i) writer.put(n + i, values[i], column_of);
    }
  }
}

}  // namespace ffpa
