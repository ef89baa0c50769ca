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

// A tile of a gradient: where it lies, and which chunks add to it.
struct GradientTile {
  ProductTile tile;
  MapPlace place;  // place of its first row
  int rows;        // existing rows, from the first one on
  bool continues;  // earlier chunks have left sums
  bool is_last;    // no later chunk adds to it

  // Says whether the 16 rows from row `row` of the tile on exist, are complete without other chunks, and have 16 bits
  // each: then they can go to the gradient's map box by box.
  FFPA_DEVICE bool are_results(const BackwardParams& params, int row) const {
    return is_last && !continues && !params.float_gradients && rows - row >= 16;
  }
  // Returns the factor of a result.
  template <class Element>
  FFPA_DEVICE float scale(const BackwardParams& params) const {
    return tile.product == Product::kDv ? kUnitOfP<Element> : params.attention.scale;
  }
};

template <class Tiles>
FFPA_DEVICE GradientTile gradient_tile(const BackwardParams& params, const ProductTile& tile) {
  const RowTile rows = rows_of_product<Tiles>(params, tile);
  const RowRange& all = Tiles::kOfQ ? rows.entry.q : rows.entry.k;
  const int first = all.begin + (Tiles::kOfQ ? rows.first : first_key_of_product<Tiles>(params, tile));
  const int head = Tiles::kOfQ ? rows.head() : head_kv_of(params, tile.entry);
  const TileRange part = tile.in_chunk(params), of_all = summed<Tiles>(params, tile);
  return {tile,
          {first, head, params.attention.is_packed() ? 0 : tile.batch},
          all.end - first,
          part.first > of_all.first,
          part.end >= of_all.end};
}

template <class Element, class Tiles>
class GradientWriter {
  static constexpr bool kOfQ = Tiles::kOfQ;

 public:
  FFPA_DEVICE GradientWriter(const BackwardParams& params, const GradientTile& gradient, int lane)
      : params_(params),
        continues_(gradient.continues),
        is_last_(gradient.is_last),
        scale_(gradient.scale<Element>(params)),
        rows_(gradient.rows),
        columns_(gradient.tile.columns_of_all - gradient.tile.column),
        lane_(lane) {
    const ProductTile& tile = gradient.tile;
    set_partial(tile);
    const GradientView& x = kOfQ ? params.dq : tile.product == Product::kDv ? params.dv : params.dk;
    const MapPlace& place = gradient.place;
    row_stride_ = x.row_stride;
    const int64_t offset =
        place.batch * x.batch_stride + place.head * x.head_stride + place.row * x.row_stride + tile.column;
    gmem_ = static_cast<uint8_t*>(x.data) + offset * element_bytes();
  }

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
  int rows_, columns_;  // existing rows and columns, from the tile's first ones on
  int lane_;
  float *partial_before_, *partial_;  // sums of earlier chunks; sums for later ones
  uint8_t* gmem_;
  int64_t row_stride_;
};

}  // namespace ffpa
