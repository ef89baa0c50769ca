// The steps that all forwards on wgmma have in common: Q of a row tile is brought, O follows references
// (softmax.cuh), and O is written.
#pragma once

#include <cstdint>

#include "attention/key_boxes.cuh"
#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "attention/rows/row_tiles.cuh"
#include "attention/softmax.cuh"
#include "attention/tensor_maps.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/box_ring.cuh"

namespace ffpa {

// Several warps bring keys of pages, as their copies are many and small.
inline constexpr int kPageProducers = 4;
template <bool kPaged>
inline constexpr int kProducersOfKeys = kPaged ? kPageProducers : 1;

// A forward takes these arguments, with maps of its tensors. A box of V has kValueRows keys, one of Q a tile's rows.
template <int kRows, int kValueRows = tile::kBox>
struct WgmmaForwardArguments {
  AttentionParams params;
  RowTiles<kRows> row_tiles;
  ptx::TensorMap q, k, v, out;

  LaunchStatus fill(const AttentionParams& of_call) {
    params = of_call;
    row_tiles = RowTiles<kRows>(params);
    const LaunchStatus statuses[] = {map_row_tiles(q, params, params.q, params.d_qk, kRows),
                                     map_keys(k, params, params.k, params.d_qk),
                                     map_keys(v, params, params.v, params.d_v, kValueRows),
                                     map_row_tiles(out, params, params.out, params.d_v, tile::kStoredRows)};
    return first_failure(statuses);
  }
};

// It takes these where keys lie in pages; a copy of V has kValueBoxes boxes of some keys, or is as those of K.
template <int kRows, int kValueBoxes>
struct PagedForwardArguments {
  AttentionParams params;
  RowTiles<kRows, true> row_tiles;
  KeyPages pages;
  ptx::TensorMap q, k, v, out;

  LaunchStatus fill(const AttentionParams& of_call) {
    params = of_call;
    row_tiles = RowTiles<kRows, true>(params);
    pages = KeyPages(params);
    const LaunchStatus statuses[] = {
        map_row_tiles(q, params, params.q, params.d_qk, kRows), map_pages(k, params, params.k, params.d_qk),
        kValueBoxes > 0 ? map_pages_of_values(v, params, kValueBoxes) : map_pages(v, params, params.v, params.d_v),
        map_row_tiles(out, params, params.out, params.d_v, tile::kStoredRows)};
    return first_failure(statuses);
  }
};

// Q of a row tile as a map has it whose boxes are whole tiles: the place of its first row among heads that share tiles,
// and how many rows of it come. Where the heads do not divide the tile, the rest holds anything: what comes of a row
// depends on no other, and is not written.
template <int kRows>
struct QueryTile {
  MapPlace place;
  int rows;

  FFPA_DEVICE QueryTile(const AttentionParams& params, const SharedRowTile& tile)
      : place(place_of_row(params, tile, tile.first)), rows(kRows / tile.heads * tile.heads) {
    place.head /= tile.heads;
  }

  // One lane calls this, which starts the copy of 64 columns.
  FFPA_DEVICE void load(uint32_t box_smem, const ptx::TensorMap& map, uint32_t barrier, int column) const {
    ptx::tma_load_5d(box_smem, &map, barrier, column, 0, place.row, place.head, place.batch);
  }
};

// Q of a row tile: for each 64 columns the rows of each warpgroup, or those of both together. `full` says that Q has
// landed, `empty` that all warps have their last S of it.
template <int kBoxes, int kGroups = tile::kConsumerGroups>
struct QueryBoxes {
  static constexpr uint32_t kBytes = kBoxes * kGroups * tile::kBoxBytes;
  static constexpr uint32_t kBarrierBytes = 2 * 8;

  uint32_t boxes_smem, barriers_smem;

  FFPA_DEVICE uint32_t full() const { return barriers_smem; }
  FFPA_DEVICE uint32_t empty() const { return barriers_smem + 8; }
  FFPA_DEVICE uint32_t box(int i, int group) const { return boxes_smem + (i * kGroups + group) * tile::kBoxBytes; }

  // One thread calls this, before a barrier.
  FFPA_DEVICE void init() const {
    ptx::mbarrier_init(full(), 1);
    ptx::mbarrier_init(empty(), tile::kConsumerGroups * tile::kGroupWarps);
  }

  // All lanes of the producer's warp call this. One calls load(box_smem, barrier, column) for each 64 columns, which
  // starts the copy of `rows` rows.
  template <class Load>
  FFPA_DEVICE void bring(uint32_t parity, int rows, const Load& load) const {
    if (ptx::elect_one()) {
      ptx::mbarrier_wait(empty(), parity);
      ptx::mbarrier_arrive_expect_tx(full(), kBoxes * rows * tile::kBoxRowBytes);
      FFPA_NO_UNROLL
      for (int i = 0; i < kBoxes; ++i) load(box(i, 0), full(), i * tile::kBox);
    }
    ptx::sync_warp();
  }

  // Brings the rows of a tile.
  FFPA_DEVICE void bring_tile(const ptx::TensorMap& map, const AttentionParams& params, const SharedRowTile& rows,
                              uint32_t parity) const {
    const QueryTile<kGroups * tile::kBox> q(params, rows);
    bring(parity, q.rows,
          [&](uint32_t box_smem, uint32_t barrier, int column) { q.load(box_smem, map, barrier, column); });
  }

  // All lanes of each warp that has read Q call this.
  FFPA_DEVICE void release(int lane) const {
    ptx::sync_warp();
    if (lane == 0) ptx::mbarrier_arrive(empty());
  }
};

// ScoreSums are S of a warp's 16 rows and kSteps · 64 keys, PackedProbabilities their P as A fragments.
template <int kSteps>
using ScoreSums = float[kSteps][1][tile::kBox / 8][4];
template <int kSteps>
using PackedProbabilities = uint32_t[kSteps * tile::kBox / 16][4];

// Queues scores += Q Kᵀ of 64 keys, over `boxes` boxes of columns from `first_box` on; those of K are at `k`. Without
// `accumulate` the sums begin.
template <class Element, class Queries>
FFPA_DEVICE void add_scores(float (&scores)[1][tile::kBox / 8][4], const Queries& queries, int first_box, int boxes,
                            int group, uint64_t k, bool accumulate) {
  using Sums = float[tile::kBox / 2];
  FFPA_UNROLL
  for (int box = 0; box < boxes; ++box) {
    const uint64_t q = tile::boxes_descriptor(queries.box(first_box + box, group));
    FFPA_UNROLL
    for (int depth = 0; depth < tile::kBox / 16; ++depth) {
      ptx::wgmma_ss<Element, tile::kBox>(reinterpret_cast<Sums&>(scores), q + depth * 2,
                                         k + (box * tile::kBoxBytes + depth * 32) / 16, accumulate || box + depth > 0);
    }
  }
}

// Rescales O from the references `before` to the references `now`.
template <int kSums>
FFPA_DEVICE void rescale(float (&out)[kSums], const float (&before)[2], const float (&now)[2]) {
  const float factor[2] = {growth(before[0], now[0]), growth(before[1], now[1])};
  FFPA_UNROLL
  for (int i = 0; i < kSums; ++i) out[i] *= factor[i / 2 % 2];
}

// Rescales O, which refers to `of_out`, to references that are no smaller.
template <int kSums>
FFPA_DEVICE void follow(float (&out)[kSums], float (&of_out)[2], const float (&references)[2]) {
  if (ptx::vote_any(of_out[0] != references[0] || of_out[1] != references[1])) {
    rescale(out, of_out, references);
    of_out[0] = references[0];
    of_out[1] = references[1];
  }
}

// Calls function(half, row) for the two rows a lane owns, counted among its warp's 16.
template <class Function>
FFPA_DEVICE void for_each_half(int lane, const Function& function) {
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) function(h, tile::c_coordinate(lane, 2 * h).row);
}

// Writes a warp's rows of a part's O times `factor`, from column `column` on.
template <int kSums>
FFPA_DEVICE void write_part(const float (&out)[kSums], const AttentionParams& params, const SharedRowTile& rows,
                            int row, int column, const float (&factor)[2], int lane) {
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) {
    const tile::Coordinate of_lane = tile::c_coordinate(lane, 2 * h);
    const RowPlace at = rows.place(row + of_lane.row);
    if (at.row > rows.last) continue;
    float* row_gmem = params.partial_out(rows.split()) +
                      params.row_of_all(rows.batch(), at.head, at.row) * params.part_columns() + column +
                      of_lane.column;
    FFPA_UNROLL
    for (int n = 0; n < kSums / 4; n += 4) {  // a branch for each fragment would cost registers
      if (column + n * 8 >= params.part_columns()) break;
      FFPA_UNROLL
      for (int i = n; i < n + 4; ++i) {
        ptx::st_global_8(row_gmem + i * 8,
                         {float_bits(out[4 * i + 2 * h] * factor[h]), float_bits(out[4 * i + 2 * h + 1] * factor[h])});
      }
    }
  }
}

// Writes a warp's rows of O times `factor`, or those of a part's O, from column `column` on.
template <class Element, int kSums>
FFPA_DEVICE void write_rows(const float (&out)[kSums], const AttentionParams& params, const SharedRowTile& rows,
                            int row, int column, const float (&factor)[2], int lane) {
  if (params.splits > 1) {
    write_part(out, params, rows, row, column, factor, lane);
    return;
  }
  auto writer = out_writer<Element, kSums / 4>(params, rows, row, column, lane);
  FFPA_UNROLL
  for (int n = 0; n < kSums / 4; ++n) {
    const float values[4] = {out[4 * n] * factor[0], out[4 * n + 1] * factor[0], out[4 * n + 2] * factor[1],
                             out[4 * n + 3] * factor[1]};
    writer.put(n, values);
  }
}

// Does the same by TMA, in whole boxes, where all rows exist. 16 rows are whole positions of the tile's heads, or a
// part of one position, where these are a power of two.
template <class Element, class Stores, int kSums>
FFPA_DEVICE void write_out(const float (&out)[kSums], Stores& stores, const ptx::TensorMap& map,
                           const AttentionParams& params, const SharedRowTile& rows, int row, int column,
                           const float (&factor)[2], int lane) {
  const bool all_exist = rows.place(row + tile::kStoredRows - 1).row <= rows.last;
  if (kSums % (tile::kBox / 2) == 0 && params.splits == 1 && all_exist && (rows.heads & (rows.heads - 1)) == 0) {
    const RowPlace first = rows.place(row);
    const MapPlace at = place_of_row(params, rows, first.row);
    store_rows<Element>(stores, out, factor, [&](uint32_t rows_smem, int of_box) {
      ptx::tma_store_5d(&map, rows_smem, column + of_box, first.head - rows.head(), at.row, at.head / rows.heads,
                        at.batch);
    });
  } else {
    write_rows<Element>(out, params, rows, row, column, factor, lane);
  }
}

}  // namespace ffpa
