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

namespace ffpa {

struct EntryPlace {
  int batch, head_kv;
};
FFPA_DEVICE EntryPlace entry_place(const BackwardParams& params, int entry_of_chunk) {
  const int entry = params.first_entry + entry_of_chunk;
  return {entry / params.heads_kv(), entry % params.heads_kv()};
}

// Row tile `tile` of the chunk, of one of its entries.
FFPA_DEVICE HeadRows rows_of_tile(const BackwardParams& params, int entry_of_chunk, int tile) {
  const EntryPlace place = entry_place(params, entry_of_chunk);
  const int tile_of_entry = params.first_tile + tile;
  HeadRows rows;
  rows.entry = batch_entry(params.attention, place.batch);
  rows.batch_index = place.batch;
  rows.head_index = place.head_kv * params.attention.group + tile_of_entry / params.tiles_of_head();
  rows.first = tile_of_entry % params.tiles_of_head() * kRowTile;
  rows.last = min_of(rows.first + kRowTile, rows.n_q()) - 1;
  return rows;
}

// Row 0 of that tile in the workspace.
FFPA_DEVICE int64_t workspace_row(const BackwardParams& params, int entry_of_chunk, int tile) {
  return (int64_t(entry_of_chunk) * params.tiles_of_chunk() + tile) * kRowTile;
}

// ---- tiles of P and dS ----

struct ScoreTile {
  HeadRows rows;
  int head_kv;
  int first_key;
  int64_t workspace_row;

  // Tiles without a visible pair are not computed, and nobody reads them.
  FFPA_DEVICE bool has_visible_pairs() const {
    return first_key < visible_keys_end(rows) && first_key + kKeyTile > visible_keys_begin(rows);
  }
};

FFPA_HOST_DEVICE int64_t score_tiles(const BackwardParams& params) {
  return int64_t(params.entries) * params.tiles_of_chunk() * (params.keys_of_chunk() / kKeyTile);
}

FFPA_DEVICE ScoreTile score_tile(const BackwardParams& params, int64_t item) {
  const int key_tiles = params.keys_of_chunk() / kKeyTile;
  const int key_tile = int(item % key_tiles), tile_of_all = int(item / key_tiles);
  const int entry = tile_of_all / params.tiles_of_chunk(), tile = tile_of_all % params.tiles_of_chunk();
  return {rows_of_tile(params, entry, tile), entry_place(params, entry).head_kv, params.first_key + key_tile * kKeyTile,
          workspace_row(params, entry, tile)};
}

// ---- tiles of the gradients ----

enum class Product : int { kDq, kDk, kDv };

// kProductRows rows of dQ, or keys of dK or dV, times some columns.
struct ProductTile {
  Product product;
  int entry;           // of the chunk
  int tile;            // of rows of the chunk, or of its keys
  int column;          // the first one
  int columns_of_all;  // of the gradient
};

// Tiles of dQ, or of dK and dV. Under a causal mask the longest come first: the last rows of dQ meet the most keys, the
// first keys the most rows.
template <bool kOfQ, int kColumns>
class ProductTiles {
 public:
  FFPA_HOST_DEVICE explicit ProductTiles(const BackwardParams& params)
      : entries_(params.entries),
        d_qk_(params.attention.d_qk),
        d_v_(params.attention.d_v),
        tiles_(kOfQ ? params.tiles_of_chunk() : params.keys_of_chunk() / kProductRows) {}

  FFPA_HOST_DEVICE int64_t count() const { return int64_t(entries_) * tiles_ * groups(); }

  FFPA_DEVICE ProductTile get(int64_t item) const {
    const int group = int(item % groups());
    const int tile_of_all = int(item / groups());
    const int rank = tile_of_all / entries_;
    const bool of_v = group >= qk_groups();
    return {kOfQ   ? Product::kDq
            : of_v ? Product::kDv
                   : Product::kDk,
            tile_of_all % entries_, kOfQ ? tiles_ - 1 - rank : rank, (of_v ? group - qk_groups() : group) * kColumns,
            of_v ? d_v_ : d_qk_};
  }

  // Among the tiles of dK and dV of one entry.
  FFPA_DEVICE int64_t index_in_entry(const ProductTile& tile) const {
    const int group = tile.column / kColumns + (tile.product == Product::kDv ? qk_groups() : 0);
    return int64_t(tile.tile) * groups() + group;
  }

 private:
  FFPA_HOST_DEVICE int qk_groups() const { return ceil_div(d_qk_, kColumns); }
  FFPA_HOST_DEVICE int groups() const { return qk_groups() + (kOfQ ? 0 : ceil_div(d_v_, kColumns)); }

  int entries_, d_qk_, d_v_, tiles_;
};

// Of the rows of a head that the chunk holds (those of its tiles [first_tile, end_tile)), the ones that see one of
// kProductRows keys.
FFPA_DEVICE Run run_over_rows(const BatchEntry& entry, int first_key, int first_tile, int end_tile, int step) {
  const int last_key = min_of(first_key + kProductRows, entry.n_k()) - 1;
  const int begin = max_of(first_key - entry.farthest, first_tile * kRowTile);
  const int end = min_of(min_of(last_key - entry.nearest + 1, entry.n_q()), end_tile * kRowTile);
  return last_key < first_key || end <= begin ? Run{0, 0} : whole_steps(begin, end, step);
}

// The row tiles of query head `head` (of the group) that the chunk holds.
FFPA_DEVICE TileRange tiles_of_head_in_chunk(const BackwardParams& params, int head) {
  const int first = head * params.tiles_of_head();
  return {max_of(params.first_tile - first, 0), min_of(params.end_tile - first, params.tiles_of_head())};
}

}  // namespace ffpa
