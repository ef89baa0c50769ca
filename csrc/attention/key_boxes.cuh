// The keys and values that a row tile sees, as the boxes that TMA brings. KeysOfTensor has those of a tensor,
// KeysOfPages those in the pages of a pool; keys() and values() of both return what tile::BoxProducer takes as `load`.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "attention/rows/key_pages.cuh"
#include "attention/rows/row_tile.cuh"
#include "attention/rows/row_tiles.cuh"
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

class KeysOfTensor {
 public:
  static constexpr int kTogether = 0;  // rows of V lie box by box

  FFPA_DEVICE KeysOfTensor(const AttentionParams& params, const MapPlace& place)
      : place_(place), others_follow_(params.is_packed()) {}

  // Brings `boxes` boxes of 64 columns, from `column` on, of each 64 of kKeys keys, from `key` on.
  template <int kKeys = tile::kBox>
  FFPA_DEVICE auto keys(const ptx::TensorMap& map, int column, int boxes, int key) const {
    return [=, &map](uint32_t boxes_smem, uint32_t barrier) {
      FFPA_NO_UNROLL
      for (int more = 0; more < kKeys; more += tile::kBox) {
        FFPA_NO_UNROLL
        for (int box = 0; box < boxes; ++box, boxes_smem += tile::kBoxBytes) {
          load_box(boxes_smem, map, barrier, place_, column + box * tile::kBox, key + more);
        }
      }
    };
  }

  // Brings kKeys keys of V, which are the rows of a box of its map.
  template <int kKeys = tile::kBox>
  FFPA_DEVICE auto values(const ptx::TensorMap& map, int column, int boxes, int key) const {
    return [=, &map](uint32_t boxes_smem, uint32_t barrier) {
      for (int box = 0; box < boxes; ++box, boxes_smem += kKeys * tile::kBoxRowBytes) {
        load_box(boxes_smem, map, barrier, place_, column + box * tile::kBox, key);
      }
    };
  }

  // Returns which of the 64 rows from `key` on are keys of the sequence, which has `count`, or may be multiplied.
  FFPA_DEVICE uint64_t live_rows(int key, int count) const { return live_box_rows(count - key, others_follow_); }

 private:
  MapPlace place_;
  bool others_follow_;
};

// Several warps bring the keys of a step together: each brings the runs of kPageStep keys that are its own, or all keys
// that lie together with such a run, where it is the first of them. Lanes know the pages of 32 runs, one each, in two
// adjacent blocks of keys. They look up the next block ahead, so that no copy waits for memory.
template <int kWarps>
class KeysOfPages {
  static constexpr int kBlockKeys = 16 * kPageStep;

 public:
  static constexpr int kTogether = kPageStep;  // rows of V lie so many at a time, and these box by box

  // The row tile is the one that the warp keeps.
  FFPA_DEVICE KeysOfPages(const AttentionParams& params, const KeyPages& pages, const KeptRows& kept, int warp)
      : params_(params), pages_(pages), kept_(kept), warp_(warp) {
    const MapPlace place = place_of_keys<true>(params, kept.get());
    head_ = place.head;
    first_row_ = place.row;
  }

  // Brings `boxes` boxes of 64 columns, from `column` on, of each 64 of kKeys keys, from `key` on.
  template <int kKeys = tile::kBox>
  FFPA_DEVICE auto keys(const ptx::TensorMap& map, int column, int boxes, int key) {
    return [=, &map] {
      const auto runs = find<kKeys>(key, pages_.together());
      const auto start = [=, &map](uint32_t boxes_smem, uint32_t barrier) {
        for_each(runs, [&](int row, const PageRow& at) {
          const int row_of_boxes = row / tile::kBox * boxes * tile::kBox + row % tile::kBox;
          uint32_t box_smem = boxes_smem + row_of_boxes * tile::kBoxRowBytes;
          FFPA_NO_UNROLL
          for (int box = 0; box < boxes; ++box, box_smem += tile::kBoxBytes) {
            ptx::tma_load_4d(box_smem, &map, barrier, column + box * tile::kBox, at.row, head_, at.page);
          }
        });
      };
      return tile::part_of_step(runs.count * boxes * pages_.together() * tile::kBoxRowBytes, start);
    };
  }

  // Brings kKeys keys of V, kPageStep at a time, each of these with all its `boxes` boxes: [step][box][row of the
  // step].
  template <int kKeys = tile::kBox>
  FFPA_DEVICE auto values(const ptx::TensorMap& map, int column, int boxes, int key) {
    return [=, &map] {
      const auto runs = find<kKeys>(key, kPageStep);
      const auto start = [=, &map](uint32_t boxes_smem, uint32_t barrier) {
        for_each(runs, [&](int row, const PageRow& at) {
          uint32_t step_smem = boxes_smem + row * boxes * tile::kBoxRowBytes;
          if (pages_.has_whole_boxes()) {
            ptx::tma_load_5d(step_smem, &map, barrier, 0, at.row, column / tile::kBox, head_, at.page);
            return;
          }
          FFPA_NO_UNROLL
          for (int box = 0; box < boxes; ++box, step_smem += kPageStepBytes) {
            ptx::tma_load_5d(step_smem, &map, barrier, column + box * tile::kBox, at.row, 0, head_, at.page);
          }
        });
      };
      return tile::part_of_step(runs.count * boxes * kPageStepBytes, start);
    };
  }

  FFPA_DEVICE uint64_t live_rows(int key, int count) const { return live_box_rows(count - key, true); }

 private:
  // The runs of a step that the warp brings: the first `count` of these.
  template <int kKeys>
  struct Runs {
    static constexpr int kMost = ceil_div(kKeys / kPageStep, kWarps);
    PageRow at[kMost];
    int count;
  };

  // Returns where the runs of kKeys keys lie that the warp brings, if `together` keys from each of its runs on come
  // with it. All lanes call this. Blocks mostly follow each other, and values are at most one block behind keys.
  template <int kKeys>
  FFPA_DEVICE Runs<kKeys> find(int key, int together) {
    static_assert(kWarps * kPageStep == tile::kBox, "as many keys as lie together at most have a run in each warp");
    const int block = key / kBlockKeys, own = warp_ * kPageStep;
    if (block != now_ && block != now_ - 1) look_up(block);
    Runs<kKeys> runs;
    runs.count = own < kKeys && (own & (together - 1)) == 0 ? Runs<kKeys>::kMost : 0;
    FFPA_UNROLL
    for (int i = 0; i < Runs<kKeys>::kMost; ++i) {
      const int first = key + own + i * tile::kBox;
      runs.at[i] = pages_.place_in(params_.paged, ptx::shfl_idx(of_lane_, first / kPageStep % 32), first_row_, first);
    }
    return runs;
  }

  // Makes sure that the lanes know the runs of a block, of the one before, and of the next.
  FFPA_DEVICE void look_up(int block) {
    FFPA_NO_UNROLL
    for (int last = block == now_ + 1 ? block + 1 : block; last <= block + 1; ++last) {
      of_lane_ = ahead_;
      const int lane = ptx::lane_id(), of_half = last - ((lane / 16 ^ last) & 1);  // block of half of the lanes
      const SharedRowTile rows = kept_.get();
      ahead_ = pages_.look_up(params_.paged, place_of_keys<true>(params_, rows),
                              {visible_keys_begin(rows), visible_keys_end(rows)},
                              of_half * kBlockKeys + lane % 16 * kPageStep);
    }
    now_ = block;
  }

  // Calls function(row of the step, place) for each of the runs.
  template <class Runs, class Function>
  FFPA_DEVICE void for_each(const Runs& runs, const Function& function) const {
    FFPA_UNROLL
    for (int i = 0; i < Runs::kMost; ++i) {
      if (i < runs.count) function(warp_ * kPageStep + i * tile::kBox, runs.at[i]);
    }
  }

  const AttentionParams& params_;
  const KeyPages& pages_;
  KeptRows kept_;
  int warp_, head_, first_row_, now_ = -2;
  int of_lane_ = kNoPage, ahead_ = kNoPage;  // pages of a run in the blocks up to now_, and up to the next
};

}  // namespace ffpa
