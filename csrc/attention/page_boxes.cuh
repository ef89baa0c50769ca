// Copies of keys in pages by TMA: maps of a pool, and the boxes of adjacent keys that lie in several pages.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "attention/rows/key_pages.cuh"
#include "attention/rows/row_tile.cuh"
#include "attention/tensor_maps.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/box_ring.cuh"

namespace ffpa {

// Boxes of V in pages have so many rows: one step of a product.
inline constexpr int kPageStepBytes = kPageStep * tile::kBoxRowBytes;

// Maps K in pages: a copy has 64 columns of the keys that lie together.
inline LaunchStatus map_pages(ptx::TensorMap& map, const AttentionParams& params, const TensorView& x, int columns) {
  return map_tensor(map, x, columns, params.paged.rows, params.heads_q / params.group, params.paged.pages,
                    KeyPages(params).together());
}

// Maps V in pages: a copy has kPageStep keys, and `boxes` times 64 columns where these all exist; dims are columns of a
// box, rows of a page, boxes, heads, pages. Where a row is no whole boxes, a copy has one box.
inline LaunchStatus map_pages_of_values(ptx::TensorMap& map, const AttentionParams& params, int boxes) {
  const TensorView& v = params.v;
  const bool whole = KeyPages(params).has_whole_boxes();
  return map_dims(map, v.data,
                  {{whole ? tile::kBox : params.d_v, 1, tile::kBox},
                   {params.paged.rows, v.row_stride, kPageStep},
                   {whole ? params.d_v / tile::kBox : 1, tile::kBox, whole ? boxes : 1},
                   {params.heads_q / params.group, v.head_stride, 1},
                   {params.paged.pages, v.batch_stride, 1}});
}

// Where the keys of a row tile lie in pages, and which of them it sees.
struct PagedPlace {
  const PagedKeys& paged;
  const KeyPages& pages;
  MapPlace sequence;
  RowRange seen;

  FFPA_DEVICE PageRow find(int key, int count) const { return pages.find_seen(paged, sequence, seen, key, count); }

  // Loads `boxes` boxes of 64 columns and 64 keys, from column `column` and key `key` on.
  FFPA_DEVICE void load_keys(uint32_t boxes_smem, const ptx::TensorMap& map, uint32_t barrier, int column, int boxes,
                             int key) const {
    const int together = pages.together();
    FFPA_NO_UNROLL
    for (int row = 0; row < tile::kBox; row += together, boxes_smem += together * tile::kBoxRowBytes) {
      const PageRow at = find(key + row, together);
      FFPA_NO_UNROLL
      for (int box = 0; box < boxes; ++box) {
        ptx::tma_load_4d(boxes_smem + box * tile::kBoxBytes, &map, barrier, column + box * tile::kBox, at.row,
                         sequence.head, at.page);
      }
    }
  }

  // Loads `keys` keys of V, kPageStep at a time, each of these with all its `boxes` boxes: [step][box][row of the
  // step].
  FFPA_DEVICE void load_values(uint32_t boxes_smem, const ptx::TensorMap& map, uint32_t barrier, int column, int boxes,
                               int key, int keys) const {
    FFPA_NO_UNROLL
    for (int row = 0; row < keys; row += kPageStep, boxes_smem += boxes * kPageStepBytes) {
      const PageRow at = find(key + row, kPageStep);
      if (pages.has_whole_boxes()) {
        ptx::tma_load_5d(boxes_smem, &map, barrier, 0, at.row, column / tile::kBox, sequence.head, at.page);
        continue;
      }
      FFPA_NO_UNROLL
      for (int box = 0; box < boxes; ++box) {
        ptx::tma_load_5d(boxes_smem + box * kPageStepBytes, &map, barrier, column + box * tile::kBox, at.row, 0,
                         sequence.head, at.page);
      }
    }
  }
};

}  // namespace ffpa
