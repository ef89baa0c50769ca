// This file gives the tiles of P and dS that a block computes, in an order in which blocks read little, and the same,
// at a time.
#pragma once

#include <cstdint>

#include "attention/backward/tiles.cuh"
#include "attention/params/backward_params.h"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"

namespace ffpa {

FFPA_DEVICE bool has_visible_pairs(const RowTile& rows, int first_key) {
  return first_key < visible_keys_end(rows) && first_key + kKeyTile > visible_keys_begin(rows);
}

struct ScoreTile {
  RowTile rows;
  int head_kv;
  int first_key;
  int64_t workspace_row;
  int workspace_column;
  bool is_read;      // a product may read it: the row tile has visible pairs among these keys; or it is in a band
  bool is_computed;  // these rows have visible pairs, or may have in a band; otherwise P and dS are 0

  // Says whether all rows of the tile exist and see all of its keys.
  FFPA_DEVICE bool all_seen() const {
    return all_rows_see(rows, first_key, kKeyTile) && rows.last - rows.first == kScoreRows - 1;
  }
};

// Returns the number of tiles. The workspace bounds it, and the gradients bound that of their tiles, far below 2^31.
FFPA_HOST_DEVICE int score_tiles(const BackwardParams& params) {
  return params.entries * params.tiles_of_chunk() * (kRowTile / kScoreRows) * (params.workspace_columns() / kKeyTile);
}

// It gives the tiles of this block, among those that are read: all blocks get equal shares, whatever a mask hides. They
// come in strips of a few row tiles, 32 key tiles of a strip after the other, key tile after key tile: what blocks read
// at a time is then little, and the same. All blocks walk over all strips, of which short sequences have many; so each
// lane counts the tiles that are read of one key tile. Bands are narrow enough to come row after row, in one strip for
// a head. All lanes of a warp call this. With kPassesOver, heads are passed over; that takes registers, which a warp
// has that does nothing else.
template <bool kPassesOver>
class ScoreTileSequence {
 public:
  FFPA_DEVICE explicit ScoreTileSequence(const BackwardParams& params) : params_(params), item_(ptx::block_x()) {
    batch_ = batch_of_rows(params_, 0, 0);
    pass_over_sequences();
    if (entry_ < params_.entries) enter_strip();
  }

  // Sets `tile` to the next one, and returns whether there is one.
  FFPA_DEVICE bool next(ScoreTile& tile) {
    FFPA_NO_UNROLL
    while (entry_ < params_.entries) {
      if (item_ >= items_) {
        leave();
        continue;
      }
      tile = params_.has_bands() ? get_of_band() : get();
      item_ += ptx::grid_x();
      if (tile.is_read) return true;
    }
    return false;
  }

 private:
  static constexpr int kStrip = 6, kParts = kRowTile / kScoreRows, kLanes = 32;

  // Leaves these key tiles of the strip, or the strip.
  FFPA_DEVICE void leave() {
    item_ -= items_;
    if (!params_.has_bands() && first_key_tile_ + kLanes < end_key_tile_) {
      first_key_tile_ += kLanes;
      items_ = ptx::shfl_idx(count(strip()).tiles, kLanes - 1);
      return;
    }
    first_tile_ += tiles_;
    if (begins_batch()) pass_over_sequences();
    if (entry_ < params_.entries) enter_strip();
  }

  // Goes to the batch entry of first_tile_, and returns whether that is another one.
  FFPA_DEVICE bool begins_batch() {
    if (first_tile_ == params_.tiles_of_chunk()) {
      first_tile_ = 0;
      if (++entry_ < params_.entries) batch_ = batch_of_rows(params_, entry_, 0);
    } else if (params_.first_tile + first_tile_ >= row_tiles_of(params_, batch_).end()) {
      batch_ = min_of(batch_ + 1, params_.attention.batch - 1);
    } else {
      return false;
    }
    return true;
  }

  // Passes over heads of packed sequences whose tiles all come before the item, if the chunk has all of a sequence's
  // rows: short sequences are many, and their heads have equally many tiles.
  FFPA_DEVICE void pass_over_sequences() {
    if (!kPassesOver || !params_.attention.is_packed() || params_.has_bands()) return;
    FFPA_NO_UNROLL
    while (entry_ < params_.entries) {
      const RowTilesOfHeads all = row_tiles_of(params_, batch_);
      if (params_.first_tile + first_tile_ != all.first || all.end() > params_.end_tile) return;
      const int of_head = tiles_of_head(all.of_head),
                head = of_head == 0 ? all.group : min_of(item_ / of_head, all.group);
      item_ -= head * of_head;
      first_tile_ += head * all.of_head;
      if (head < all.group) return;
      begins_batch();
    }
  }

  // Returns the number of score tiles of each head of the batch entry.
  FFPA_DEVICE int tiles_of_head(int row_tiles) const {
    const BatchEntry entry = batch_entry(params_.attention, batch_);
    const Run keys = keys_in_chunk(params_, batch_);
    int tiles = 0;
    FFPA_NO_UNROLL
    for (int first = 0; first < row_tiles; first += kLanes) {
      RowTile rows;
      rows.entry = entry;
      rows.first = min_of(first + ptx::lane_id(), row_tiles) * kRowTile;  // the last tile's end has no rows
      rows.last = min_of(rows.first + kRowTile, entry.n_q()) - 1;
      const TileRange seen = visible_tiles(rows, kKeyTile);
      tiles += max_of(min_of(seen.end, keys.end / kKeyTile) - max_of(seen.first, keys.begin / kKeyTile), 0);
    }
    FFPA_UNROLL
    for (int distance = 1; distance < kLanes; distance *= 2) tiles += ptx::shfl_xor(tiles, distance);
    return ptx::shfl_idx(tiles, 0) * kParts;
  }

  // Begins the strip of row tiles of a head from first_tile_ on.
  FFPA_DEVICE void enter_strip() {
    const RowTilePlace place = row_tile_place(params_, batch_, params_.first_tile + first_tile_);
    const int most = params_.has_bands() ? place.tiles_of_head : kStrip;
    tiles_ = min_of(clamp(place.tiles_of_head - place.tile, 1, most), params_.tiles_of_chunk() - first_tile_);
    if (params_.has_bands()) {
      items_ = params_.workspace_columns() / kKeyTile * tiles_ * kParts;
      return;
    }
    const RowTile rows = strip();
    const TileRange seen = visible_tiles(rows, kKeyTile);
    const Run keys = keys_in_chunk(params_, batch_);
    first_key_tile_ = max_of(seen.first, keys.begin / kKeyTile);
    end_key_tile_ = min_of(seen.end, keys.end / kKeyTile);
    items_ = ptx::shfl_idx(count(rows).tiles, kLanes - 1);
  }

  // Returns the rows of the strip.
  FFPA_DEVICE RowTile strip() const { return rows_of_tile(params_, entry_, batch_, first_tile_, 0, tiles_ * kRowTile); }

  // A lane's key tile: the first row tile that reads it, and how many tiles are read of it and of those before it.
  struct Counted {
    int first_row_tile, tiles;
  };
  FFPA_DEVICE Counted count(const RowTile& strip) const {
    const int key_tile = min_of(first_key_tile_ + ptx::lane_id(), end_key_tile_), key = key_tile * kKeyTile;
    // A row tile sees a key of the tile if its last row sees the first key or a later one, and its first row the last
    // key or an earlier one.
    const int first_seeing = key - strip.farthest(), last_seeing = key + kKeyTile - 1 - strip.nearest();
    const bool is_seen = key_tile < end_key_tile_ && first_seeing <= strip.last && last_seeing >= 0;
    const int first = max_of(first_seeing, strip.first) / kRowTile;
    const int end = min_of(last_seeing, strip.last) / kRowTile + 1;
    int tiles = is_seen ? max_of(end - first, 0) * kParts : 0;
    FFPA_UNROLL
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const int before = ptx::shfl_idx(tiles, ptx::lane_id() + kLanes - distance);
      if (ptx::lane_id() >= distance) tiles += before;
    }
    return {first, tiles};
  }

  FFPA_DEVICE ScoreTile get() const {
    const RowTile rows = strip();
    const Counted counted = count(rows);
    const int lane = ptx::bfind(ptx::vote_ballot(counted.tiles <= item_)) + 1;  // those of lanes before it come earlier
    const int before = ptx::shfl_idx(counted.tiles, lane + kLanes - 1);
    const int first_part = (ptx::shfl_idx(counted.first_row_tile, lane) - rows.first / kRowTile) * kParts;
    const int part = first_part + item_ - (lane > 0 ? before : 0), first_key = (first_key_tile_ + lane) * kKeyTile;
    return tile_of(part_of(rows, part * kScoreRows, kScoreRows), part, first_key, keys_in_chunk(params_, batch_).begin,
                   true);
  }

  FFPA_DEVICE ScoreTile get_of_band() const {
    const RowTile all = strip();
    const int key_tiles = params_.workspace_columns() / kKeyTile, part = item_ / key_tiles;
    const RowTile rows = part_of(all, part * kScoreRows, kScoreRows);
    const int column_0 = FirstKeys::of(params_, rows.entry, batch_).at(rows.first);
    const int first_key = column_0 + item_ % key_tiles * kKeyTile;
    const Run keys = keys_in_chunk(params_, batch_);
    // Tiles of dK and dV read whole key tiles of rows that see a part of one.
    const TileRange seen = visible_tiles(part_of(all, part / kParts * kRowTile, kRowTile), kKeyTile);
    const bool is_read = first_key < min_of(seen.end * kKeyTile, keys.end) && first_key + kKeyTile > keys.begin;
    return tile_of(rows, part, first_key, column_0, is_read);
  }

  // Returns `count` rows of the strip, from row `offset` of it on.
  static FFPA_DEVICE RowTile part_of(RowTile strip, int offset, int count) {
    strip.first += offset;
    strip.last = min_of(strip.last, strip.first + count - 1);
    return strip;
  }

  FFPA_DEVICE ScoreTile tile_of(const RowTile& rows, int part, int first_key, int column_0, bool is_read) const {
    return {rows,
            head_kv_of(params_, entry_),
            first_key,
            workspace_row(params_, entry_, first_tile_) + part * kScoreRows,
            first_key - column_0,
            is_read,
            params_.has_bands() || has_visible_pairs(rows, first_key)};
  }

  const BackwardParams& params_;
  int item_;   // next item, counted from the first one of these key tiles of the strip
  int items_;  // number of items there
  int entry_ = 0, batch_;
  int first_tile_ = 0, tiles_;         // row tiles of the strip
  int first_key_tile_, end_key_tile_;  // key tiles of the strip that are left; not in bands
};

}  // namespace ffpa
