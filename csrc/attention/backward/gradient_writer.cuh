// Writes a finished tile of dQ, dK or dV, 16 rows of a warp at a time: adds what earlier chunks left, and stores the
// sums for a later chunk or as the result.
#pragma once

#include <cstdint>

#include "attention/backward/tiles.cuh"
#include "attention/params/backward_params.h"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "tile/fragment_output.cuh"

namespace ffpa {

template <class Element, class Tiles>
class GradientWriter {
  static constexpr bool kOfQ = Tiles::kOfQ;

 public:
  FFPA_DEVICE GradientWriter(const BackwardParams& params, const ProductTile& tile, int lane)
      : params_(params),
        continues_(tile.in_chunk(params).first > summed<Tiles>(params, tile).first),
        is_last_(tile.in_chunk(params).end >= summed<Tiles>(params, tile).end),
        scale_(tile.product == Product::kDv ? kUnitOfP<Element> : params.attention.scale),
        columns_(tile.columns_of_all - tile.column),
        lane_(lane) {
    set_partial(tile);
    const RowTile rows = rows_of_product<Tiles>(params, tile);
    const RowRange& all = kOfQ ? rows.entry.q : rows.entry.k;
    const int first = all.begin + (kOfQ ? rows.first : first_key_of_product<Tiles>(params, tile));
    const GradientView& x = kOfQ ? params.dq : tile.product == Product::kDv ? params.dv : params.dk;
    place_ = {first, kOfQ ? rows.head() : head_kv_of(params, tile.entry),
              params.attention.is_packed() ? 0 : tile.batch};
    rows_ = all.end - first;
    row_stride_ = x.row_stride;
    const int64_t offset =
        place_.batch * x.batch_stride + place_.head * x.head_stride + first * x.row_stride + tile.column;
    gmem_ = static_cast<uint8_t*>(x.data) + offset * element_bytes();
  }

  // Says whether the 16 rows from row `row` of the tile on exist, are complete without other chunks, and have 16 bits
  // each: then they can go to the gradient's map box by box.
  FFPA_DEVICE bool are_results(int row) const {
    return is_last_ && !continues_ && !params_.float_gradients && rows_ - row >= 16;
  }
  FFPA_DEVICE float scale() const { return scale_; }            // factor of a result
  FFPA_DEVICE const MapPlace& place() const { return place_; }  // place of the tile's first row

  // Writes kFragments fragments of 16 rows, from row `row` and fragment `first` of the tile on; fragment(n, values)
  // gives their values.
  template <int kFragments, class Fragment>
  FFPA_DEVICE void write(int row, int first, const Fragment& fragment) const {
    if (row >= rows_) return;
    const int64_t offset = row * int64_t{Tiles::kColumns} + first * 128;
    tile::RowWriter<Element, kFragments> writer(
        {gmem_ + (row * row_stride_ + first * 8) * element_bytes(), row_stride_, rows_ - row}, columns_ - first * 8,
        params_.float_gradients, lane_);
    FFPA_UNROLL
    for (int n = 0; n < kFragments; ++n) {
      float values[4];
      fragment(n, values);
      if (continues_) tile::add_fragment(values, partial_before_ + offset, n, lane_);
      if (!is_last_) {
        tile::save_fragment(partial_ + offset, n, values, lane_);
        continue;
      }
      FFPA_UNROLL
      for (float& value : values) value *= scale_;
      writer.put(n, values);
    }
  }

 private:
  FFPA_DEVICE int element_bytes() const { return params_.float_gradients ? 4 : 2; }

  FFPA_DEVICE void set_partial(const ProductTile& tile) {
    constexpr int64_t kTileFloats = Tiles::kRows * Tiles::kColumns;
    const Tiles tiles(params_);
    if (kOfQ || !params_.sums_take_turns()) {
      partial_before_ = partial_ = params_.partial + tiles.index_in_entry(tile) * kTileFloats;
      return;
    }
    const int64_t half = tiles.tiles_of_rows(params_.keys_of_longest() / Tiles::kRows) * kTileFloats;
    float* of_tile = params_.partial + tiles.index_in_sequence(tile) * kTileFloats;
    partial_before_ = of_tile + params_.turn * half;
    partial_ = of_tile + (1 - params_.turn) * half;
  }

  const BackwardParams& params_;
  bool continues_, is_last_;
  float scale_;
  MapPlace place_;
  int rows_, columns_;  // existing rows and columns, from the tile's first ones on
  int lane_;
  float *partial_before_, *partial_;  // sums of earlier chunks; sums for later ones
  uint8_t* gmem_;
  int64_t row_stride_;
};

}  // namespace ffpa
