// These are the row tiles of a forward, in the order in which blocks take them.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "attention/rows/packed_tiles.cuh"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/kept_value.cuh"

namespace ffpa {

// A block that is free takes the next item: a tile, or a part of its keys. Tiles go head by head, so that blocks share
// K and V in the L2 cache; among heads whose K and V it holds together, the longest tiles come first under a causal
// mask. Packed sequences count as one entry: a head has the tiles of one sequence after the other
// (rows/packed_tiles.cuh). Query heads that share their tiles (AttentionParams::tile_heads) count as one.
//
// RowTiles is made on the host and passed with a kernel's arguments: it takes no registers.
template <int kRows, bool kPaged = false>
class RowTiles {
 public:
  RowTiles() = default;
  explicit RowTiles(const AttentionParams& params)
      : heads_(params.heads_q / params.tile_heads),
        rows_of_head_(kRows / params.tile_heads),
        inverse_(SharedRowTile::inverse_of(params.tile_heads)),
        splits_(params.splits),
        tiles_(params.is_packed() ? packed_tiles(params.packed_q, params.batch, rows_of_head_)
                                  : ceil_div(params.n_q, rows_of_head_)) {
    const int heads_kv = params.heads_q / params.group, entries = (params.is_packed() ? 1 : params.batch) * heads_kv;
    const int group = params.group / params.tile_heads;
    const int64_t keys = params.is_packed() ? params.packed_k.total : params.n_k;
    const int64_t bytes = keys * (int64_t(params.d_qk) + params.d_v) * 2;  // bytes of K and V of one entry
    const int together = int(clamp(kCachedBytes / max_of(bytes, int64_t{1}), int64_t{1}, int64_t{max_of(entries, 1)}));
    count_ = entries * group * tiles_ * params.splits;
    last_section_ = max_of(ceil_div(entries, together) - 1, 0);
    heads_of_section_ = Divisor(together * group);
    heads_of_last_ = Divisor((entries - last_section_ * together) * group);
    items_of_section_ = Divisor(together * group * tiles_);
  }

  // row_tiles.py makes sure that 32 bits are enough, also for the items that blocks take beyond the last one.
  FFPA_HOST_DEVICE int count() const { return count_; }

  // Returns the item to take in place of item `i` so that the heads of a tile's rows come one after the other, and
  // before the parts of its keys: blocks that work at the same time then read rows of heads that lie side by side.
  FFPA_DEVICE int heads_before_parts(int i) const {
    const int of_parts = heads_.quotient(i), of_tiles = splits_.quotient(of_parts);
    const int batch = of_tiles / tiles_, tile = of_tiles - batch * tiles_;
    const int head = batch * heads_.value + heads_.remainder(i), section = heads_of_section_.quotient(head);
    const int heads = (section == last_section_ ? heads_of_last_ : heads_of_section_).value;
    const int in_section = tile * heads + heads_of_section_.remainder(head);
    return (section * items_of_section_.value + in_section) * splits_.value + splits_.remainder(of_parts);
  }

  // Returns the place of row `i` of any tile, counted from the tile's first head and row.
  FFPA_DEVICE RowPlace place_in_tile(const AttentionParams& params, int i) const {
    const int row = i * inverse_ >> 16;
    return {i - row * params.tile_heads, row};
  }

  // All lanes of a warp call this together. ahead(rows) is called before lengths are read: batch entry, heads and part
  // are known by then.
  template <class Ahead>
  FFPA_DEVICE SharedRowTile get(const AttentionParams& params, int item, const Ahead& ahead) const {
    SharedRowTile rows;
    rows.part = uint16_t(splits_.remainder(item));
    item = splits_.quotient(item);
    const int section = items_of_section_.quotient(item), in_section = items_of_section_.remainder(item);
    const Divisor& heads = section == last_section_ ? heads_of_last_ : heads_of_section_;
    const int head = section * heads_of_section_.value + heads.remainder(in_section);  // among all that share no tiles
    rows.heads = uint16_t(params.tile_heads);
    rows.inverse = inverse_;
    rows.batch_index = heads_.quotient(head);
    rows.head_index = heads_.remainder(head) * params.tile_heads;
    int tile = tiles_ - 1 - heads.quotient(in_section);
    if (params.is_packed()) {
      const PackedTile of_sequence = packed_tile(params.packed_q, params.batch, tile, rows_of_head_);
      rows.batch_index = of_sequence.sequence;
      tile = of_sequence.tile;
    }
    ahead(rows);
    rows.entry = batch_entry<kPaged>(params, rows.batch_index);
    rows.first = tile * rows_of_head_;
    rows.last = min_of(rows.first + rows_of_head_, rows.n_q()) - 1;
    return rows;
  }
  FFPA_DEVICE SharedRowTile get(const AttentionParams& params, int item) const {
    return get(params, item, [](const SharedRowTile&) {});
  }

 private:
  static constexpr int64_t kCachedBytes = 32 << 20;

  Divisor heads_;     // heads of a batch entry that share no tiles
  int rows_of_head_;  // rows of a tile that belong to one head
  int inverse_;
  Divisor splits_;
  int tiles_;  // row tiles of a head, in one batch entry or in all packed sequences
  int count_, last_section_;
  Divisor heads_of_section_, heads_of_last_, items_of_section_;  // a section is heads whose K and V are cached together
};

// A kernel on mma.sync takes these arguments: the call's numbers, and its row tiles.
template <int kRows>
struct RowTileArguments {
  AttentionParams params;
  RowTiles<kRows> row_tiles;

  LaunchStatus fill(const AttentionParams& of_call) {
    *this = {of_call, RowTiles<kRows>(of_call)};
    return {};
  }
};

using KeptRows = tile::KeptValue<SharedRowTile>;

// Calls function() for each row tile that the block takes: the one whose rows the warp has kept, then those that next()
// says. They are kept in shared memory: they would fill too many registers.
template <class Tiles, class Next, class Function>
FFPA_DEVICE void for_each_row_tile(const AttentionParams& params, const Tiles& tiles, const KeptRows& kept, int lane,
                                   const Next& next, const Function& function) {
  FFPA_NO_UNROLL
  while (true) {
    const SharedRowTile rows = kept.get();
    if (rows.first <= rows.last) function();
    const int item = next();
    if (item >= tiles.count()) return;
    ptx::sync_warp();  // all lanes have read the rows kept before
    kept.keep(tiles.get(params, item), lane);
  }
}

}  // namespace ffpa
