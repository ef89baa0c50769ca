// A tile of a gradient in shared memory, as the warp that finds tiles leaves it: what it is, the steps that it is
// summed over, and where their operands lie. Whoever brings these needs no divisions, no search and no offsets of
// sequences.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention/backward/gradient_writer.cuh"
#include "attention/backward/tile_queue.cuh"
#include "attention/backward/tiles.cuh"
#include "attention/params/backward_params.h"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "tile/box_ring.cuh"

namespace ffpa {

// The keys that a tile of dQ is summed over.
struct KeySource {
  MapPlace k;  // place of key 0
  Run keys;
  int n_k;
  int first_row;
  FirstKeys first_keys;

  template <class Tiles>
  static FFPA_DEVICE KeySource of(const BackwardParams& params, const ProductTile& tile) {
    const RowTile rows = rows_of_product<Tiles>(params, tile);
    return {place_of_keys(params.attention, rows), run_over_chunk(params, rows, tile::kBox), rows.n_k(), rows.first,
            FirstKeys::of(params, rows.entry, rows.batch())};
  }
};

// The rows that a tile of dK or dV is summed over, in each query head of the group.
struct RowSource {
  MapPlace q;  // place of row 0 in the group's first head
  Run rows;    // those that see the keys, whatever the chunk holds
  HeadRange heads;
  int first_key;
  FirstKeys first_keys;
  int first_tile, tiles_of_head;  // row tiles of the group's first head, counted from the chunk's first one
  int live_word;

  template <class Tiles>
  static FFPA_DEVICE RowSource of(const BackwardParams& params, const ProductTile& tile) {
    const AttentionParams& attention = params.attention;
    const BatchEntry entry = batch_entry(attention, tile.batch);
    const RowTilesOfHeads all = row_tiles_of(params, tile.batch);
    const int first_key = first_key_of_product<Tiles>(params, tile);
    const int head = head_kv_of(params, tile.entry) * attention.group;
    return {{entry.q.begin, head, attention.is_packed() ? 0 : tile.batch},
            run_over_rows(entry, first_key, Tiles::kRows, 0, all.of_head, 1),
            heads_of_chunk(params, tile.batch),
            first_key,
            FirstKeys::of(params, entry, tile.batch),
            all.first - params.first_tile,
            all.of_head,
            first_live_word(params, tile.batch)};
  }

  FFPA_DEVICE int first_tile_of(int head) const { return first_tile + head * tiles_of_head; }

  // Returns those rows of query head `head` (of the group) that the chunk holds.
  FFPA_DEVICE Run run_over_head(const BackwardParams& params, int head) const {
    const int before = first_tile_of(head);
    return whole_steps(max_of(rows.begin, -before * kRowTile),
                       min_of(rows.end, (params.tiles_of_chunk() - before) * kRowTile), tile::kBox);
  }

  FFPA_DEVICE const uint64_t* live_rows_of(const BackwardParams& params, int head) const {
    const int64_t head_of_all = int64_t(q.batch) * params.attention.heads_q + q.head + head;
    return params.live_rows + head_of_all * params.live_words() + live_word;
  }
};

// OperandSource is KeySource or RowSource.
template <class OperandSource>
class KeptGradientTile : public KeptNumbers<13 + sizeof(OperandSource) / 4> {
  static constexpr int kOfTile = 13, kOfSource = sizeof(OperandSource) / 4;
  using Base = KeptNumbers<kOfTile + kOfSource>;
  using Base::number;

 public:
  using Source = OperandSource;
  using Base::Base;

  static FFPA_DEVICE void put(TileQueue<KeptGradientTile>& queue, const GradientTile& gradient, int steps,
                              const Source& source) {
    const ProductTile& tile = gradient.tile;
    const MapPlace& place = gradient.place;
    typename Base::Numbers numbers = {int(tile.product),   tile.entry,       tile.tile,  tile.batch,  tile.column,
                                      tile.columns_of_all, place.row,        place.head, place.batch, gradient.rows,
                                      gradient.continues,  gradient.is_last, steps};
    memcpy(numbers + kOfTile, &source, sizeof(Source));
    queue.put(numbers);
  }

  FFPA_DEVICE GradientTile get() const {
    return {{Product(number(0)), number(1), number(2), number(3), number(4), number(5)},
            {number(6), number(7), number(8)},
            number(9),
            number(10) != 0,
            number(11) != 0};
  }
  FFPA_DEVICE Product product() const { return Product(number(0)); }
  FFPA_DEVICE int entry() const { return number(1); }
  FFPA_DEVICE int tile() const { return number(2); }
  FFPA_DEVICE int column() const { return number(4); }
  FFPA_DEVICE int steps() const { return number(12); }

  FFPA_DEVICE Source source() const {
    int numbers[kOfSource];
    FFPA_UNROLL
    for (int i = 0; i < kOfSource; ++i) numbers[i] = number(kOfTile + i);
    Source source;
    memcpy(&source, numbers, sizeof(Source));
    return source;
  }
};

}  // namespace ffpa
