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

  // These are kKeys adjacent keys.
  template <int kKeys>
  struct Runs {
    int first;
  };

  // Returns the kKeys keys from `key` on.
  template <int kKeys = tile::kBox>
  FFPA_DEVICE Runs<kKeys> find(int key) const {
    return {key};
  }

  // Brings `boxes` boxes of 64 columns, from `column` on, of each 64 of these keys.
  template <int kKeys>
  FFPA_DEVICE auto keys(const ptx::TensorMap& map, int column, int boxes, const Runs<kKeys>& runs) const {
    return [=, &map](uint32_t boxes_smem, uint32_t barrier) {
      FFPA_NO_UNROLL
      for (int more = 0; more < kKeys; more += tile::kBox) {
        FFPA_NO_UNROLL
        for (int box = 0; box < boxes; ++box, boxes_smem += tile::kBoxBytes) {
          load_box(boxes_smem, map, barrier, place_, column + box * tile::kBox, runs.first + more);
        }
      }
    };
  }

  // Brings these keys of V, which are the rows of a box of its map.
  template <int kKeys>
  FFPA_DEVICE auto values(const ptx::TensorMap& map, int column, int boxes, const Runs<kKeys>& runs) const {
    return [=, &map](uint32_t boxes_smem, uint32_t barrier) {
      for (int box = 0; box < boxes; ++box, boxes_smem += kKeys * tile::kBoxRowBytes) {
        load_box(boxes_smem, map, barrier, place_, column + box * tile::kBox, runs.first);
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
// that lie together with such a run, where it is the first of them. Lanes know where 32 runs lie, one each, in two
// adjacent blocks of keys. They look up the pages of the next block ahead, so that no copy waits for memory. What a
// step executes is dear: it takes its few warps longer than the others need for the products.
template <int kWarps>
class KeysOfPages {
  static constexpr int kBlockKeys = 16 * kPageStep;

 public:
  static constexpr int kTogether = kPageStep;  // rows of V lie so many at a time, and these box by box

  // The row tile is the one that the warp keeps.
  FFPA_DEVICE KeysOfPages(const AttentionParams& params, const KeyPages& pages, const KeptRows& kept, int warp)
      : params_(params), pages_(pages), kept_(kept), warp_(warp) {
    head_ = place_of_keys<true>(params, kept.get()).head;
  }

  // The runs of a step that the warp may bring.
  template <int kKeys>
  struct Runs {
    static constexpr int kMost = ceil_div(kKeys / kPageStep, kWarps);
    PageRow at[kMost];
  };

  // Returns where the warp's runs of the kKeys keys from `key` on lie. All lanes call this. Blocks mostly follow each
  // other, and values are at most one block behind keys.
  template <int kKeys = tile::kBox>
  FFPA_DEVICE Runs<kKeys> find(int key) {
    static_assert(kWarps * kPageStep == tile::kBox, "as many keys as lie together at most have a run in each warp");
    const int block = uint32_t(key) / kBlockKeys;
    if (block != now_ && block != now_ - 1) look_up(block);
    Runs<kKeys> runs;
    FFPA_UNROLL
    for (int i = 0; i < Runs<kKeys>::kMost; ++i) {
      const int lane = uint32_t(key + warp_ * kPageStep + i * tile::kBox) / kPageStep % 32;
      runs.at[i] = {ptx::shfl_idx(of_lane_.page, lane), ptx::shfl_idx(of_lane_.row, lane)};
    }
    return runs;
  }

  // Brings `boxes` boxes of 64 columns, from `column` on, of each 64 of these keys.
  template <int kKeys>
  FFPA_DEVICE auto keys(const ptx::TensorMap& map, int column, int boxes, const Runs<kKeys>& runs) const {
    return [=, &map] {
      const int count = count_of<kKeys>(pages_.together());
      const auto start = [=, &map](uint32_t boxes_smem, uint32_t barrier) {
        for_each(runs, count, [&](int row, const PageRow& at) {
          const int row_of_boxes = row / tile::kBox * boxes * tile::kBox + row % tile::kBox;
          uint32_t box_smem = boxes_smem + row_of_boxes * tile::kBoxRowBytes;
          FFPA_NO_UNROLL
          for (int box = 0; box < boxes; ++box, box_smem += tile::kBoxBytes) {
            ptx::tma_load_4d(box_smem, &map, barrier, column + box * tile::kBox, at.row, head_, at.page);
          }
        });
      };
      return tile::part_of_step(count * boxes * pages_.together() * tile::kBoxRowBytes, start);
    };
  }

  // Brings these keys of V, kPageStep at a time, each of these with all its `boxes` boxes: [step][box][row of the
  // step].
  template <int kKeys>
  FFPA_DEVICE auto values(const ptx::TensorMap& map, int column, int boxes, const Runs<kKeys>& runs) const {
    return [=, &map] {
      const int count = count_of<kKeys>(kPageStep);
      const auto start = [=, &map](uint32_t boxes_smem, uint32_t barrier) {
        for_each(runs, count, [&](int row, const PageRow& at) {
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
      return tile::part_of_step(count * boxes * kPageStepBytes, start);
    };
  }

  FFPA_DEVICE uint64_t live_rows(int key, int count) const { return live_box_rows(count - key, true); }

 private:
  // Returns how many of its runs the warp brings, if `together` keys from each of them on come with it.
  template <int kKeys>
  FFPA_DEVICE int count_of(int together) const {
    const int own = warp_ * kPageStep;
    return own < kKeys && (own & (together - 1)) == 0 ? Runs<kKeys>::kMost : 0;
  }

  // Makes sure that the lanes know the runs of a block, of the one before, and the pages of the next.
  FFPA_DEVICE void look_up(int block) {
    FFPA_NO_UNROLL
    for (int last = block == now_ + 1 ? block + 1 : block; last <= block + 1; ++last) {
      const SharedRowTile rows = kept_.get();
      const MapPlace place = place_of_keys<true>(params_, rows);
      of_lane_ = pages_.place_in(params_.paged, ahead_, place.row, run_of_lane(last - 1));
      ahead_ =
          pages_.look_up(params_.paged, place, {visible_keys_begin(rows), visible_keys_end(rows)}, run_of_lane(last));
    }
    now_ = block;
  }

  // Returns the first key of the lane's run, where lanes have those of a block, the last one, and of the one before.
  static FFPA_DEVICE int run_of_lane(int last) {
    const int lane = ptx::lane_id(), block = last - ((lane / 16 ^ last) & 1);
    return block * kBlockKeys + lane % 16 * kPageStep;
  }

  // Calls function(row of the step, place) for the first `count` of the runs.
  template <class Runs, class Function>
  FFPA_DEVICE void for_each(const Runs& runs, int count, const Function& function) const {
    FFPA_UNROLL
    for (int i = 0; i < Runs::kMost; ++i) {
      if (i < count) function(warp_ * kPageStep + i * tile::kBox, runs.at[i]);
    }
  }

  const AttentionParams& params_;
  const KeyPages& pages_;
  KeptRows kept_;
  int warp_, head_, now_ = -2;
  PageRow of_lane_ = {kNoPage, 0};  // where a run of the blocks up to now_ lies
  int ahead_ = kNoPage;             // page of a run of the blocks up to the next
};

}  // namespace ffpa
