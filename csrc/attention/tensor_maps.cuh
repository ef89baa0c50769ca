// The TMA maps of a call's tensors: all have boxes of 64 columns (tile/box_ring.cuh), with 64 rows, or those of a row
// tile, where they are read.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/box_ring.cuh"

namespace ffpa {

// A dim of a map, innermost first; its stride counts elements, its box how many of them a copy has.
struct MapDim {
  int64_t size, stride;
  int box;
};

// Maps 16-bit elements. What lies outside reads as 0, and is not written.
template <int kRank>
LaunchStatus map_dims(ptx::TensorMap& map, const uint16_t* data, const MapDim (&dims)[kRank]) {
  TensorMapSpec spec;
  spec.base = data;
  spec.rank = kRank;
  spec.swizzle = Swizzle::k128Bytes;
  for (int dim = 0; dim < kRank; ++dim) {
    spec.size[dim] = uint64_t(dims[dim].size);
    // Nobody steps along a dim of one, whose stride may be anything.
    spec.stride_bytes[dim] = uint64_t(dims[dim].size == 1 ? dims[0].size : dims[dim].stride) * 2;
    spec.box[dim] = uint32_t(dims[dim].box);
  }
  return ptx::encode_tensor_map(map, spec);
}

// Maps `rows` rows of `columns` columns in each head.
inline LaunchStatus map_tensor(ptx::TensorMap& map, const TensorView& x, int columns, int rows, int heads, int batch,
                               int box_rows) {
  return map_dims(map, x.data,
                  {{columns, 1, tile::kBox},
                   {rows, x.row_stride, box_rows},
                   {heads, x.head_stride, 1},
                   {batch, x.batch_stride, 1}});
}

// Map a tensor that has the rows of q, or those of k; for packed sequences, all rows of the tensor.
inline LaunchStatus map_queries(ptx::TensorMap& map, const AttentionParams& params, const TensorView& x, int columns,
                                int box_rows = tile::kBox) {
  const bool packed = params.is_packed();
  return map_tensor(map, x, columns, packed ? params.packed_q.total : params.n_q, params.heads_q,
                    packed ? 1 : params.batch, box_rows);
}

// Maps a tensor that has the rows of q in boxes of `rows` rows of a row tile: dims are columns, query heads that share
// the tile, rows, other heads, batch. If heads do not divide a box, or are no whole boxes, it is smaller.
inline LaunchStatus map_row_tiles(ptx::TensorMap& map, const AttentionParams& params, const TensorView& x, int columns,
                                  int rows) {
  const bool packed = params.is_packed();
  const int heads = params.tile_heads;
  return map_dims(map, x.data,
                  {{columns, 1, tile::kBox},
                   {heads, x.head_stride, min_of(heads, rows)},
                   {packed ? params.packed_q.total : params.n_q, x.row_stride, max_of(rows / heads, 1)},
                   {params.heads_q / heads, heads * x.head_stride, 1},
                   {packed ? 1 : params.batch, x.batch_stride, 1}});
}

inline LaunchStatus map_keys(ptx::TensorMap& map, const AttentionParams& params, const TensorView& x, int columns,
                             int box_rows = tile::kBox) {
  const bool packed = params.is_packed();
  return map_tensor(map, x, columns, packed ? params.packed_k.total : params.n_k, params.heads_q / params.group,
                    packed ? 1 : params.batch, box_rows);
}

// Maps a matrix of a workspace, in boxes of `box_rows` rows.
inline LaunchStatus map_matrix(ptx::TensorMap& map, const uint16_t* data, int64_t columns, int64_t rows,
                               int box_rows = tile::kBox) {
  return map_dims(map, data, {{columns, 1, tile::kBox}, {rows, columns, box_rows}});
}

// Loads the box at column `column` and row `row` of a tensor, to all blocks of the cluster.
template <int kClusterBlocks = 1>
FFPA_DEVICE void load_box(uint32_t box_smem, const ptx::TensorMap& map, uint32_t barrier, const MapPlace& place,
                          int column, int row) {
  if constexpr (kClusterBlocks == 1) {
    ptx::tma_load_4d(box_smem, &map, barrier, column, place.row + row, place.head, place.batch);
  } else {
    ptx::tma_load_4d_multicast(box_smem, &map, barrier, column, place.row + row, place.head, place.batch,
                               (1 << kClusterBlocks) - 1);
  }
}

// Stores 16 rows of a warp's sums, those columns that are whole boxes, times a factor for each half of the rows. One
// lane calls send(rows_smem, column), which starts the copy of a box to a map whose boxes have 16 rows, too.
template <class Element, class Stores, int kSums, class Send>
FFPA_DEVICE void store_rows(Stores& stores, const float (&sums)[kSums], const float (&factor)[2], const Send& send) {
  constexpr int kBoxSums = tile::kBox / 2;  // sums of a thread in one box
  FFPA_UNROLL
  for (int box = 0; box < kSums / kBoxSums; ++box) {
    tile::PackedRows packed;
    FFPA_UNROLL
    for (int i = 0; i < kBoxSums / 2; ++i) {
      const int at = box * kBoxSums + 2 * i;
      packed[i] = ptx::pack<Element>(sums[at] * factor[i % 2], sums[at + 1] * factor[i % 2]);
    }
    stores.store(packed, [&](uint32_t rows_smem) { send(rows_smem, box * tile::kBox); });
  }
}

}  // namespace ffpa
