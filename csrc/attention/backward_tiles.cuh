// Work items of the backward's two large kernels, the same for every way to multiply: which tile an item is, where its
// rows and keys lie, and over what a product runs.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "attention/head_rows.cuh"
#include "attention/row_block.cuh"
#include "attention/visible_keys.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/special_registers.cuh"

namespace ffpa {

struct EntryPlace {
  int batch, head_kv;
};
FFPA_DEVICE EntryPlace entry_place(const BackwardParams& params, int entry_of_chunk) {
  const int entry = params.first_entry + entry_of_chunk;
  return {entry / params.heads_kv(), entry % params.heads_kv()};
}

// `count` rows of one of the chunk's entries, a part of row tile `tile` of the chunk: from its row `offset` on.
FFPA_DEVICE HeadRows rows_of_tile(const BackwardParams& params, int entry_of_chunk, int tile, int offset, int count) {
  const EntryPlace place = entry_place(params, entry_of_chunk);
  const int tile_of_entry = params.first_tile + tile;
  HeadRows rows;
  rows.entry = batch_entry(params.attention, place.batch);
  rows.batch_index = place.batch;
  rows.head_index = place.head_kv * params.attention.group + tile_of_entry / params.tiles_of_head();
  rows.first = tile_of_entry % params.tiles_of_head() * kRowTile + offset;
  rows.last = min_of(rows.first + count, rows.n_q()) - 1;
  return rows;
}

// Row 0 of that tile in the workspace.
FFPA_DEVICE int64_t workspace_row(const BackwardParams& params, int entry_of_chunk, int tile) {
  return (int64_t(entry_of_chunk) * params.tiles_of_chunk() + tile) * kRowTile;
}

// ---- tiles of P and dS ----

FFPA_DEVICE bool has_visible_pairs(const HeadRows& rows, int first_key) {
  return first_key < visible_keys_end(rows) && first_key + kKeyTile > visible_keys_begin(rows);
}

struct ScoreTile {
  HeadRows rows;
  int head_kv;
  int first_key;
  int64_t workspace_row;
  bool is_read;      // by some product: the whole row tile has visible pairs among these keys
  bool is_computed;  // these rows have; otherwise P and dS are 0

  // All rows of a tile exist, and see all of its keys.
  FFPA_DEVICE bool all_seen() const {
    return all_rows_see(rows, first_key, kKeyTile) && rows.last - rows.first == kScoreRows - 1;
  }
};

// The workspace bounds their number, and that of the gradients' tiles, far below 2^31.
FFPA_HOST_DEVICE int score_tiles(const BackwardParams& params) {
  return params.entries * params.tiles_of_chunk() * (kRowTile / kScoreRows) * (params.keys_of_chunk() / kKeyTile);
}

// The tiles of this block, of those that are read: shared by all blocks evenly, whatever a mask hides. They come in
// bands of a few row tiles, key tile after key tile: what blocks read at a time is then little, and the same.
class ScoreTileSequence {
 public:
  FFPA_DEVICE explicit ScoreTileSequence(const BackwardParams& params)
      : params_(params),
        heads_(params.heads_of_chunk()),
        tiles_of_head_(params.tiles_of_chunk() / heads_),
        bands_of_head_(ceil_div(tiles_of_head_, kBand)),
        item_(ptx::block_x()) {
    enter_band();
  }

  // Whether there is one more.
  FFPA_DEVICE bool next(ScoreTile& tile) {
    for (;; item_ += ptx::grid_x()) {
      while (band_ < params_.entries * heads_ * bands_of_head_ && item_ >= band_end_) {
        ++band_;
        enter_band();
      }
      if (band_ >= params_.entries * heads_ * bands_of_head_) return false;
      tile = get(item_ - (band_end_ - key_tiles_ * parts()));
      if (!tile.is_read) continue;
      item_ += ptx::grid_x();
      return true;
    }
  }

 private:
  static constexpr int kBand = 6, kParts = kRowTile / kScoreRows;

  FFPA_DEVICE int parts() const { return tiles_ * kParts; }  // row by row, of the band

  FFPA_DEVICE void enter_band() {
    if (band_ >= params_.entries * heads_ * bands_of_head_) return;
    const int head_of_all = band_ / bands_of_head_, first = band_ % bands_of_head_ * kBand;
    entry_ = head_of_all / heads_;
    first_tile_ = head_of_all % heads_ * tiles_of_head_ + first;
    tiles_ = min_of(kBand, tiles_of_head_ - first);
    const TileRange seen = visible_tiles(rows_of_tile(params_, entry_, first_tile_, 0, tiles_ * kRowTile), kKeyTile);
    first_key_tile_ = max_of(seen.first, params_.first_key / kKeyTile);
    key_tiles_ = max_of(min_of(seen.end, params_.end_key / kKeyTile) - first_key_tile_, 0);
    band_end_ += key_tiles_ * parts();
  }

  FFPA_DEVICE ScoreTile get(int in_band) const {
    const int first_key = (first_key_tile_ + in_band / parts()) * kKeyTile, part = in_band % parts();
    const int tile = first_tile_ + part / kParts, offset = part % kParts * kScoreRows;
    const HeadRows rows = rows_of_tile(params_, entry_, tile, offset, kScoreRows);
    return {rows,
            entry_place(params_, entry_).head_kv,
            first_key,
            workspace_row(params_, entry_, tile) + offset,
            has_visible_pairs(rows_of_tile(params_, entry_, tile, 0, kRowTile), first_key),
            has_visible_pairs(rows, first_key)};
  }

  const BackwardParams& params_;
  int heads_, tiles_of_head_, bands_of_head_;
  int item_;
  int band_ = 0, band_end_ = 0;  // the items before its end are those of all bands up to it
  int entry_, first_tile_, tiles_;
  int first_key_tile_, key_tiles_;
};

// ---- tiles of the gradients ----

enum class Product : int { kDq, kDk, kDv };

// Some rows of dQ, or keys of dK or dV, times some columns.
struct ProductTile {
  Product product;
  int entry;           // of the chunk
  int tile;            // of so many rows, or keys, of the chunk
  int column;          // the first one
  int columns_of_all;  // of the gradient
};

// Tiles of dQ, or of dK and dV. Where all have as many steps, those of one head after the other: its K, or Q and dO,
// then stay in L2. Under a causal mask the longest of all heads come first: the last rows of dQ meet the most keys, the
// first keys the most rows.
template <bool kIsOfQ, int kTileRows, int kTileColumns>
class ProductTiles {
 public:
  static constexpr bool kOfQ = kIsOfQ;
  static constexpr int kRows = kTileRows, kColumns = kTileColumns;
  static_assert(kRowTile % kRows == 0 && kKeyTile % kRows == 0, "a row or key tile is whole tiles");

  FFPA_HOST_DEVICE explicit ProductTiles(const BackwardParams& params)
      : entries_(params.entries),
        d_qk_(params.attention.d_qk),
        d_v_(params.attention.d_v),
        heads_(kOfQ ? params.heads_of_chunk() : 1),
        tiles_(kOfQ ? params.tiles_of_chunk() * (kRowTile / kRows) / heads_ : params.keys_of_chunk() / kRows),
        all_as_long_(params.attention.left < 0 && params.attention.right < 0 && !params.attention.is_packed()) {}

  FFPA_HOST_DEVICE int count() const { return entries_ * heads_ * tiles_ * groups(); }

  FFPA_DEVICE ProductTile get(int item) const {
    const int group = item % groups(), tile_of_all = item / groups();
    const int all_heads = entries_ * heads_;
    const int entry_head = all_as_long_ ? tile_of_all / tiles_ : tile_of_all % all_heads;
    const int rank = all_as_long_ ? tile_of_all % tiles_ : tile_of_all / all_heads;
    const bool of_v = group >= qk_groups();
    return {kOfQ   ? Product::kDq
            : of_v ? Product::kDv
                   : Product::kDk,
            entry_head / heads_, entry_head % heads_ * tiles_ + (kOfQ ? tiles_ - 1 - rank : rank),
            (of_v ? group - qk_groups() : group) * kColumns, of_v ? d_v_ : d_qk_};
  }

  // Among the tiles of dK and dV of one entry.
  FFPA_DEVICE int64_t index_in_entry(const ProductTile& tile) const {
    const int group = tile.column / kColumns + (tile.product == Product::kDv ? qk_groups() : 0);
    return int64_t(tile.tile) * groups() + group;
  }

 private:
  FFPA_HOST_DEVICE int qk_groups() const { return ceil_div(d_qk_, kColumns); }
  FFPA_HOST_DEVICE int groups() const { return qk_groups() + (kOfQ ? 0 : ceil_div(d_v_, kColumns)); }

  int entries_, d_qk_, d_v_;
  int heads_, tiles_;  // of an entry; of each
  bool all_as_long_;
};

// The tiles of this block, or of its cluster. Round after round over them, every other one backwards: tiles get
// shorter, and nobody shall always have the longer one.
template <class Tiles, int kClusterBlocks = 1>
class ProductTileSequence {
 public:
  FFPA_DEVICE explicit ProductTileSequence(const BackwardParams& params) : tiles_(params) {}

  // Whether there is one more.
  FFPA_DEVICE bool next(ProductTile& tile) {
    const int clusters = ptx::grid_x() / kClusterBlocks, cluster = ptx::block_x() / kClusterBlocks;
    const int item = round_ + (backwards_ ? clusters - 1 - cluster : cluster);
    round_ += clusters;
    backwards_ = !backwards_;
    if (item >= tiles_.count()) return false;  // nor in any round after this one
    tile = tiles_.get(item);
    return true;
  }

 private:
  Tiles tiles_;
  int round_ = 0;
  bool backwards_ = false;
};

// The first key of a tile of dK or dV.
template <class Tiles>
FFPA_DEVICE int first_key_of_product(const BackwardParams& params, const ProductTile& tile) {
  return params.first_key + tile.tile * Tiles::kRows;
}

// The rows of a tile of dQ.
template <class Tiles>
FFPA_DEVICE HeadRows rows_of_product(const BackwardParams& params, const ProductTile& tile) {
  constexpr int kParts = kRowTile / Tiles::kRows;
  const int part = Tiles::kOfQ ? tile.tile : 0;
  return rows_of_tile(params, tile.entry, part / kParts, part % kParts * Tiles::kRows, Tiles::kRows);
}

// Of the rows of a head that the chunk holds (those of its tiles [first_tile, end_tile)), the ones that see one of
// `keys` keys.
FFPA_DEVICE Run run_over_rows(const BatchEntry& entry, int first_key, int keys, int first_tile, int end_tile,
                              int step) {
  const int last_key = min_of(first_key + keys, entry.n_k()) - 1;
  const int begin = max_of(first_key - entry.farthest, first_tile * kRowTile);
  const int end = min_of(min_of(last_key - entry.nearest + 1, entry.n_q()), end_tile * kRowTile);
  return last_key < first_key || end <= begin ? Run{0, 0} : whole_steps(begin, end, step);
}

// Query heads (of the group) that the chunk holds rows of: [first, end).
struct HeadRange {
  int first, end;
};
FFPA_DEVICE HeadRange heads_of_chunk(const BackwardParams& params) {
  return {params.first_tile / params.tiles_of_head(), ceil_div(params.end_tile, params.tiles_of_head())};
}

// What a tile of dK or dV is summed over in query head `head` (of the group).
template <class Tiles>
FFPA_DEVICE Run run_over_head(const BackwardParams& params, const ProductTile& tile, const BatchEntry& entry, int head,
                              int step) {
  const int first = head * params.tiles_of_head();
  return run_over_rows(entry, first_key_of_product<Tiles>(params, tile), Tiles::kRows,
                       max_of(params.first_tile - first, 0), min_of(params.end_tile - first, params.tiles_of_head()),
                       step);
}

}  // namespace ffpa
