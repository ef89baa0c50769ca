// This file says where the rows and keys of the backward's tiles lie, the same for every way to multiply; and which
// tile an item of the products is, and what it is summed over. Tiles of P and dS are in score_tiles.cuh.
#pragma once

#include <cstdint>

#include "attention/params/backward_params.h"
#include "attention/rows/packed_tiles.cuh"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"

namespace ffpa {

FFPA_DEVICE int head_kv_of(const BackwardParams& params, int entry_of_chunk) {
  return (params.first_entry + entry_of_chunk) % params.heads_kv();
}
FFPA_DEVICE int batch_of(const BackwardParams& params, int entry_of_chunk) {  // not for packed sequences
  return (params.first_entry + entry_of_chunk) / params.heads_kv();
}

// The tiles of a batch entry: its row tiles among those of an entry, head after head, and its key tiles.
struct RowTilesOfHeads {
  int first, of_head, group;

  FFPA_DEVICE int first_of(int head) const { return first + head * of_head; }
  FFPA_DEVICE int end() const { return first_of(group); }
};
FFPA_DEVICE RowTilesOfHeads row_tiles_of(const BackwardParams& params, int batch) {
  const AttentionParams& attention = params.attention;
  const int group = attention.group;
  if (!attention.is_packed()) return {0, params.tiles_of_head(), group};
  const TileRange of_head = tiles_of_sequence(attention.packed_q, attention.batch, batch, kRowTile);
  return {of_head.first * group, of_head.end - of_head.first, group};
}
FFPA_DEVICE TileRange key_tiles_of(const BackwardParams& params, int batch) {
  const AttentionParams& attention = params.attention;
  if (!attention.is_packed()) return {0, params.keys_of_entry() / kKeyTile};
  return tiles_of_sequence(attention.packed_k, attention.batch, batch, kKeyTile);
}

// Return the batch entry of a row tile of the chunk, or of a key tile of an entry. All lanes of a warp call them.
FFPA_DEVICE int batch_of_rows(const BackwardParams& params, int entry_of_chunk, int tile) {
  const AttentionParams& attention = params.attention;
  if (!attention.is_packed()) return batch_of(params, entry_of_chunk);
  const int tile_of_head = (params.first_tile + tile) / attention.group;
  return packed_tile(attention.packed_q, attention.batch, tile_of_head, kRowTile).sequence;
}
FFPA_DEVICE int batch_of_keys(const BackwardParams& params, int entry_of_chunk, int key_tile) {
  const AttentionParams& attention = params.attention;
  if (!attention.is_packed()) return batch_of(params, entry_of_chunk);
  return packed_tile(attention.packed_k, attention.batch, key_tile, kKeyTile).sequence;
}

// The place of a row tile of an entry among those of its batch entry; the place exists, whatever the offsets say.
struct RowTilePlace {
  int head, tile;  // head of the group; tile of the head
  int tiles_of_head;
};
FFPA_DEVICE RowTilePlace row_tile_place(const BackwardParams& params, int batch, int tile_of_entry) {
  const RowTilesOfHeads all = row_tiles_of(params, batch);
  const int tile = max_of(tile_of_entry - all.first, 0), head = min_of(tile / all.of_head, all.group - 1);
  return {head, tile - head * all.of_head, all.of_head};
}

// Returns `count` rows of row tile `tile` of the chunk, in one of its entries: those from row `offset` of the tile on.
FFPA_DEVICE RowTile rows_of_tile(const BackwardParams& params, int entry_of_chunk, int batch, int tile, int offset,
                                 int count) {
  const RowTilePlace place = row_tile_place(params, batch, params.first_tile + tile);
  RowTile rows;
  rows.entry = batch_entry(params.attention, batch);
  rows.batch_index = batch;
  rows.head_index = head_kv_of(params, entry_of_chunk) * params.attention.group + place.head;
  rows.first = place.tile * kRowTile + offset;
  rows.last = min_of(rows.first + count, rows.n_q()) - 1;
  return rows;
}

// Returns those keys of a batch entry that the chunk has.
FFPA_DEVICE Run keys_in_chunk(const BackwardParams& params, int batch) {
  const int before = key_tiles_of(params, batch).first * kKeyTile;
  return {max_of(params.first_key - before, 0), params.end_key - before};
}

// The key in column 0 of the workspace, for each row of a head: the chunk's first key; or, under a window, where the
// band of a score tile's rows begins. A band holds all keys that some of these rows see. Products read zeros beside it,
// and inside it only what the score tiles have written.
struct FirstKeys {
  static constexpr int kStep = 64;  // steps of products have no more keys or rows, and begin at multiples of their size

  int of_row_0, rows;  // `rows` selects the bits of a row's number by which bands move

  static FFPA_DEVICE FirstKeys of(const BackwardParams& params, const BatchEntry& entry, int batch) {
    static_assert(kScoreRows % kStep == 0 && kKeyTile % kStep == 0, "no step is partly inside of a band");
    if (!params.has_bands()) return {keys_in_chunk(params, batch).begin, 0};
    return {entry.nearest & -kStep, -kScoreRows};
  }
  FFPA_DEVICE int at(int row) const { return max_of(of_row_0 + (row & rows), 0); }
};

// Returns the row of the workspace where row 0 of that tile lies.
FFPA_DEVICE int64_t workspace_row(const BackwardParams& params, int entry_of_chunk, int tile) {
  return (int64_t(entry_of_chunk) * params.tiles_of_chunk() + tile) * kRowTile;
}

// ---- tiles of the gradients ----

enum class Product : int { kDq, kDk, kDv };

// A tile of some rows of dQ, or keys of dK or dV, and some columns.
struct ProductTile {
  Product product;
  int entry;           // entry of the chunk
  int tile;            // index of the tile among those of the chunk's rows, or keys
  int batch;           // batch entry that they belong to
  int column;          // first column of the tile
  int columns_of_all;  // columns of the gradient

  // Returns what the chunk has of all that the tile is summed over: row tiles of the entry, or key tiles for dQ.
  FFPA_DEVICE TileRange in_chunk(const BackwardParams& params) const {
    if (product == Product::kDq) return {params.first_key / kKeyTile, params.end_key / kKeyTile};
    return {params.first_tile, params.end_tile};
  }
};

// The tiles of dQ, or of dK and dV. Where all have equally many steps, they come head after head: a head's K, or Q and
// dO, then stay in L2. Under a causal mask the longest tiles of all heads come first: the last rows of dQ meet the most
// keys, the first keys the most rows.
template <bool kIsOfQ, int kTileRows, int kTileColumns>
class ProductTiles {
 public:
  static constexpr bool kOfQ = kIsOfQ;
  static constexpr int kRows = kTileRows, kColumns = kTileColumns;
  static_assert(kRowTile % kRows == 0 && kKeyTile % kRows == 0, "a row or key tile is whole tiles");

  FFPA_HOST_DEVICE explicit ProductTiles(const BackwardParams& params)
      : params_(params),
        heads_(kOfQ && !params.attention.is_packed() ? params.heads_of_chunk() : 1),
        tiles_(kOfQ ? params.tiles_of_chunk() / heads_ * (kRowTile / kRows) : params.keys_of_chunk() / kRows),
        all_as_long_(params.attention.left < 0 && params.attention.right < 0 && !params.attention.is_packed()) {}

  // Leaves out tiles of packed sequences that have no rows in the chunk; the host does not know which these are.
  FFPA_DEVICE void narrow() {
    if (kOfQ || !params_.attention.is_packed()) return;
    const int first_batch = batch_of_rows(params_, 0, 0);
    const int last_batch = batch_of_rows(params_, 0, params_.tiles_of_chunk() - 1);
    const int in_chunk = params_.first_key / kKeyTile;
    const int first = max_of(key_tiles_of(params_, first_batch).first, in_chunk);
    const int end = min_of(key_tiles_of(params_, last_batch).end, params_.end_key / kKeyTile);
    before_ = (first - in_chunk) * (kKeyTile / kRows);
    tiles_ = max_of(end - first, 0) * (kKeyTile / kRows);
  }

  FFPA_HOST_DEVICE int count() const { return params_.entries * heads_ * tiles_ * groups(); }

  FFPA_DEVICE ProductTile get(int item) const {
    const int group = item % groups(), tile_of_all = item / groups();
    const int all_heads = params_.entries * heads_;
    const int entry_head = all_as_long_ ? tile_of_all / tiles_ : tile_of_all % all_heads;
    const int rank = all_as_long_ ? tile_of_all % tiles_ : tile_of_all / all_heads;
    const bool of_v = group >= qk_groups();
    ProductTile tile;
    tile.product = kOfQ ? Product::kDq : of_v ? Product::kDv : Product::kDk;
    tile.entry = entry_head / heads_;
    tile.tile = before_ + entry_head % heads_ * tiles_ + (kOfQ ? tiles_ - 1 - rank : rank);
    tile.batch = kOfQ ? batch_of_rows(params_, tile.entry, tile.tile * kRows / kRowTile)
                      : batch_of_keys(params_, tile.entry, (params_.first_key + tile.tile * kRows) / kKeyTile);
    tile.column = (of_v ? group - qk_groups() : group) * kColumns;
    tile.columns_of_all = of_v ? params_.attention.d_v : params_.attention.d_qk;
    return tile;
  }

  // Return the index of a tile among those of one entry (of dQ, or of dK and dV), or among those that the chunk has of
  // one packed sequence's keys.
  FFPA_DEVICE int64_t index_in_entry(const ProductTile& tile) const { return index_from(tile, 0); }
  FFPA_DEVICE int64_t index_in_sequence(const ProductTile& tile) const {
    const int before = max_of(key_tiles_of(params_, tile.batch).first * kKeyTile - params_.first_key, 0);
    return index_from(tile, before / kRows);
  }
  FFPA_DEVICE int64_t tiles_of_rows(int tiles) const { return int64_t(tiles) * groups(); }

 private:
  FFPA_DEVICE int64_t index_from(const ProductTile& tile, int first) const {
    const int group = tile.column / kColumns + (tile.product == Product::kDv ? qk_groups() : 0);
    return int64_t(tile.tile - first) * groups() + group;
  }

  FFPA_HOST_DEVICE int qk_groups() const { return ceil_div(params_.attention.d_qk, kColumns); }
  FFPA_HOST_DEVICE int groups() const { return qk_groups() + (kOfQ ? 0 : ceil_div(params_.attention.d_v, kColumns)); }

  const BackwardParams& params_;
  int heads_, tiles_;  // heads of an entry; tiles of each head
  int before_ = 0;     // tiles of the chunk that are left out
  bool all_as_long_;
};

// Returns the first key of a tile of dK or dV, counted in its batch entry.
template <class Tiles>
FFPA_DEVICE int first_key_of_product(const BackwardParams& params, const ProductTile& tile) {
  return params.first_key + tile.tile * Tiles::kRows - key_tiles_of(params, tile.batch).first * kKeyTile;
}

// Returns the rows of a tile of dQ.
template <class Tiles>
FFPA_DEVICE RowTile rows_of_product(const BackwardParams& params, const ProductTile& tile) {
  constexpr int kParts = kRowTile / Tiles::kRows;
  const int part = Tiles::kOfQ ? tile.tile : 0;
  return rows_of_tile(params, tile.entry, tile.batch, part / kParts, part % kParts * Tiles::kRows, Tiles::kRows);
}

// Returns the chunk's keys that some of `rows` see: what a tile of dQ is summed over.
FFPA_DEVICE Run run_over_chunk(const BackwardParams& params, const RowTile& rows, int step) {
  const Run keys = keys_in_chunk(params, rows.batch());
  return whole_steps(max_of(visible_keys_begin(rows), keys.begin), min_of(visible_keys_end(rows), keys.end), step);
}

// Returns the rows of a head that see one of `keys` keys, among those in its row tiles [first_tile, end_tile), which
// the chunk holds.
FFPA_DEVICE Run run_over_rows(const BatchEntry& entry, int first_key, int keys, int first_tile, int end_tile,
                              int step) {
  const int last_key = min_of(first_key + keys, entry.n_k()) - 1;
  const int begin = max_of(first_key - entry.farthest, first_tile * kRowTile);
  const int end = min_of(min_of(last_key - entry.nearest + 1, entry.n_q()), end_tile * kRowTile);
  return last_key < first_key || end <= begin ? Run{0, 0} : whole_steps(begin, end, step);
}

// Returns all that a tile is summed over: from the first to the last row tile of the entry, or key tile for dQ, that
// has visible pairs for it. The chunk with the first one begins the sum, that with the last one ends it. Those between
// may have no pairs (between the rows of two heads that see the keys): then they need a launch only if sums take turns.
template <class Tiles>
FFPA_DEVICE TileRange summed(const BackwardParams& params, const ProductTile& tile) {
  if constexpr (Tiles::kOfQ) {
    const TileRange seen = visible_tiles(rows_of_product<Tiles>(params, tile), kKeyTile);
    const int before = key_tiles_of(params, tile.batch).first;
    return {before + seen.first, before + seen.end};
  }
  const RowTilesOfHeads all = row_tiles_of(params, tile.batch);
  const Run rows = run_over_rows(batch_entry(params.attention, tile.batch), first_key_of_product<Tiles>(params, tile),
                                 Tiles::kRows, 0, all.of_head, 1);
  if (rows.begin == rows.end) return {0, 0};
  return {all.first + rows.begin / kRowTile, all.first_of(all.group - 1) + ceil_div(rows.end, kRowTile)};
}

// Says whether the chunk adds to a tile, or passes on what others have added. Tiles that no chunk adds to are zero
// already. (Rows that begin to see keys inside of a tile, past the last key, see none.)
template <class Tiles>
FFPA_DEVICE bool has_part_of(const BackwardParams& params, const ProductTile& tile) {
  if constexpr (Tiles::kOfQ) {
    const RowTile rows = rows_of_product<Tiles>(params, tile);
    if (visible_keys_begin(rows) >= visible_keys_end(rows)) return false;
  }
  const TileRange part = tile.in_chunk(params), all = summed<Tiles>(params, tile);
  return max_of(part.first, all.first) < min_of(part.end, all.end);
}

// The numbers of tiles of this block, or of its cluster. Blocks take them round after round, every other round
// backwards: tiles get shorter, and no block shall always have the longer one.
template <int kClusterBlocks = 1>
class TileRounds {
 public:
  FFPA_DEVICE int next() {
    const int clusters = ptx::grid_x() / kClusterBlocks, cluster = ptx::block_x() / kClusterBlocks;
    const int item = round_ + (backwards_ ? clusters - 1 - cluster : cluster);
    round_ += clusters;
    backwards_ = !backwards_;
    return item;
  }

 private:
  int round_ = 0;
  bool backwards_ = false;
};

// It gives the tiles of this block, which come in rounds.
template <class Tiles>
class ProductTileSequence {
 public:
  FFPA_DEVICE explicit ProductTileSequence(const BackwardParams& params) : params_(params), tiles_(params) {
    tiles_.narrow();
  }

  // Sets `tile` to the next one, and returns whether there is one.
  FFPA_DEVICE bool next(ProductTile& tile) {
    for (;;) {
      const int item = rounds_.next();
      if (item >= tiles_.count()) return false;  // later rounds have none either
      tile = tiles_.get(item);
      if (has_part_of<Tiles>(params_, tile)) return true;
    }
  }

 private:
  const BackwardParams& params_;
  Tiles tiles_;
  TileRounds<> rounds_;
};

// The query heads (of the group) of a batch entry that the chunk holds rows of: [first, end).
struct HeadRange {
  int first, end;
};
FFPA_DEVICE HeadRange heads_of_chunk(const BackwardParams& params, int batch) {
  const RowTilesOfHeads all = row_tiles_of(params, batch);
  return {max_of(params.first_tile - all.first, 0) / all.of_head,
          ceil_div(min_of(params.end_tile, all.end()) - all.first, all.of_head)};
}

// Returns what a tile of dK or dV is summed over in query head `head` (of the group).
template <class Tiles>
FFPA_DEVICE Run run_over_head(const BackwardParams& params, const ProductTile& tile, const BatchEntry& entry, int head,
                              int step) {
  const RowTilesOfHeads all = row_tiles_of(params, tile.batch);
  const int first = all.first_of(head), end = all.first_of(head + 1);
  return run_over_rows(entry, first_key_of_product<Tiles>(params, tile), Tiles::kRows,
                       max_of(params.first_tile - first, 0), min_of(params.end_tile, end) - first, step);
}

// Returns the number of steps that a tile is summed over.
template <class Tiles>
FFPA_DEVICE int steps_of_product(const BackwardParams& params, const ProductTile& tile, int step) {
  if (Tiles::kOfQ) return run_over_chunk(params, rows_of_product<Tiles>(params, tile), step).steps(step);
  const BatchEntry entry = batch_entry(params.attention, tile.batch);
  const HeadRange heads = heads_of_chunk(params, tile.batch);
  const auto of_head = [&](int head) { return run_over_head<Tiles>(params, tile, entry, head, step).steps(step); };
  const int last = heads.end - 1, between = last - heads.first - 1;
  if (last < heads.first) return 0;
  int steps = of_head(heads.first);
  if (between >= 0) steps += of_head(last);
  if (between > 0) steps += between * of_head(heads.first + 1);  // the chunk holds these heads whole: all have as many
  return steps;
}

// Returns the row of the workspace where row 0 of the head lies, or would lie if the chunk held it.
FFPA_DEVICE int64_t workspace_row_of_head(const BackwardParams& params, const ProductTile& tile, int head) {
  return workspace_row(params, tile.entry, row_tiles_of(params, tile.batch).first_of(head) - params.first_tile);
}

// Returns the word of the batch entry's first row, in each of its heads.
FFPA_DEVICE int first_live_word(const BackwardParams& params, int batch) {
  const AttentionParams& attention = params.attention;
  return attention.is_packed() ? first_tile_of_sequence(attention.packed_q, batch, kLiveRows) : 0;
}

// Returns the bits of query head `head` (of all heads), from the batch entry's first row on.
FFPA_DEVICE const uint64_t* live_rows_of_head(const BackwardParams& params, int batch, int head) {
  const AttentionParams& attention = params.attention;
  if (attention.is_packed()) {
    return params.live_rows + int64_t(head) * params.live_words() + first_live_word(params, batch);
  }
  return params.live_rows + (int64_t(batch) * attention.heads_q + head) * params.live_words();
}

}  // namespace ffpa
