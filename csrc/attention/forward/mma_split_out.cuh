// Moves O of the split-D forward: into scratch and back between tiles, 16 bytes of a fragment a lane; and, with the row
// sums, into out and LSE, or into the result of a part of the keys for forward_merge.
#pragma once

#include <cstdint>

#include "attention/forward/mma_split.cuh"
#include "attention/rows/placed_row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
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

// Leaves the row sums of all warps in the place of the maxima, and writes the LSE.
template <class Config>
FFPA_DEVICE void ForwardMmaSplit<Config>::publish_row_sums() {
  tile::for_each_row<kScoreM>([&](int m, int h) { publish(m, h, tile::sum_of_lanes(row_sum_[m][h])); });
  sync_team();
  const bool is_part = params_.splits > 1;
  float* gmem = is_part ? params_.partial_sums(block_.split()) + 2 * partial_row() : block_.lse();
  const int first_row = block_.first_row(), last_row = block_.last_row();
  if (gmem == nullptr || first_column_ > 0 || score_warp_by_keys() > 0 || lane_ % 4 > 0) return;
  tile::for_each_row<kScoreM>([&](int m, int h) {
    const int row = score_row() + m * 16 + tile::c_coordinate(lane_, 2 * h).row;
    if (first_row + row > last_row) return;
    if (is_part) {
      ptx::st_global_8(gmem + 2 * (first_row + row), {float_bits(row_max_[m][h]), float_bits(row_sum(row))});
    } else {
      const float lse = in_natural_units(row_max_[m][h] + ptx::lg2(row_sum(row)));  // -inf without keys
      ptx::st_global_4(gmem + first_row + row, float_bits(lse));
    }
  });
}

// Writes O of a part of the keys in fp32; forward_merge adds it to the others.
template <class Config>
FFPA_DEVICE void ForwardMmaSplit<Config>::write_partial(const Out& out, int first_column) const {
  const int first_row = block_.first_row(), last_row = block_.last_row();
  float* head_gmem = params_.partial_out(block_.split()) + partial_row() * params_.part_columns();
  tile::for_each_row<kOutM>([&](int m, int h) {
    const int row = out_row(m, h);
    if (first_row + row > last_row) return;
    const float sum = row_sum(row);
    const float inverse = sum > 0 ? 1 / sum : 0.0f;
    float* row_gmem = head_gmem + int64_t(first_row + row) * params_.part_columns();
    FFPA_UNROLL
    for (int n = 0; n < kOutN; ++n) {
      const int column = pair_column(n / 2) + n % 2 * 8 + tile::c_coordinate(lane_, 0).column;
      if (first_column + column >= params_.d_v) continue;
      float values[4];
      out[m][n].get(values);
      ptx::st_global_8(row_gmem + first_column + column,
                       {float_bits(values[2 * h] * inverse), float_bits(values[2 * h + 1] * inverse)});
    }
  });
}

template <class Config>
FFPA_DEVICE void ForwardMmaSplit<Config>::write_final(const Out& out, int first_column) const {
  const int first_row = block_.first_row(), last_row = block_.last_row();
  uint16_t* head_gmem = block_.out();
  tile::for_each_row<kOutM>([&](int m, int h) {
    const int row = out_row(m, h);
    const float sum = row_sum(row);
    const float inverse = sum > 0 ? 1 / sum : 0.0f;
    uint16_t* row_gmem = head_gmem + int64_t(first_row + row) * params_.out.row_stride;
    const bool row_exists = first_row + row <= last_row;
    uint32_t chunk[4];
    FFPA_UNROLL
    for (int n = 0; n < kOutN; ++n) {
      // Each of the four lanes of a row has 4 of a fragment's 16 bytes; each lane collects one fragment out of four.
      float values[4];
      out[m][n].get(values);
      const uint32_t mine = ptx::pack<Element>(values[2 * h] * inverse, values[2 * h + 1] * inverse);
      FFPA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const uint32_t piece = ptx::shfl_idx(mine, lane_ / 4 * 4 + i);
        if (lane_ % 4 == n % 4) chunk[i] = piece;
      }
      if (n % 4 < 3 && n < kOutN - 1) continue;
      const int fragment = n / 4 * 4 + lane_ % 4;
      const int column = pair_column(fragment / 2) + fragment % 2 * 8;
      const bool exists = fragment < kOutN && column < kColumns && first_column + column < params_.d_v;
      if (row_exists && exists) ptx::st_global_16(row_gmem + first_column + column, chunk);
    }
  });
}

}  // namespace ffpa
