// WgmmaBlock is what the persistent forwards on wgmma have in common: the arguments of their kernel, and where a block
// has what in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/key_boxes.cuh"
#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "attention/rows/row_tiles.cuh"
#include "attention/softmax.cuh"
#include "base/compiler.h"
#include "ptx/instructions.cuh"
#include "tile/box_ring.cuh"

namespace ffpa {

// Config::Smem plans the shared memory: it has slots and ring_barriers of Config::Ring; kept, the rows in work of each
// warp; items, which is a Config::Items; and, where Q stays, q and q_barriers of Config::Queries.
template <class Config>
class WgmmaBlock {
 protected:
  using Arguments = typename Config::Arguments;
  using Smem = typename Config::Smem;
  using Ring = typename Config::Ring;
  static constexpr int kProducers = int(sizeof(Smem::kept) / sizeof(Smem::kept[0])) - tile::kConsumerWarps;

  FFPA_DEVICE WgmmaBlock(const Arguments& arguments, const AttentionParams& params)
      : arguments_(arguments),
        params_(params),
        lane_(ptx::lane_id()),
        warp_(ptx::shfl_idx(ptx::thread_x() / 32, 0)),
        smem_(ptx::dynamic_smem()) {}

  FFPA_DEVICE Ring ring(int i = 0) const {
    return {smem_ + uint32_t(offsetof(Smem, slots)) + i * Ring::kBytes,
            smem_ + uint32_t(offsetof(Smem, ring_barriers)) + i * Ring::kBarrierBytes};
  }
  FFPA_DEVICE KeptRows kept_rows(int keeper) const {
    return KeptRows(smem_ + offsetof(Smem, kept) + keeper * KeptRows::kBytes);
  }
  // All warps call this before the block's first barrier: those that work keep the row tile that the block begins with,
  // and one that seldom does calls init().
  template <class Init>
  FFPA_DEVICE void begin(const Init& init) const {
    const bool multiplies = warp_ >= tile::kGroupWarps;
    if (multiplies || warp_ < kProducers) {
      const int keeper = multiplies ? kProducers + warp_ - tile::kGroupWarps : warp_;
      const auto ahead = [&](const SharedRowTile& rows) {
        if constexpr (Config::kPaged) {  // the first keys wait for the length, and then for the table
          if (!multiplies) arguments_.pages.prefetch(params_.paged, rows.batch_index, rows.part * params_.part_keys);
        }
      };
      kept_rows(keeper).keep(arguments_.row_tiles.get(params_, Config::Items::first(), ahead), lane_);
    }
    if (warp_ == tile::kGroupWarps - 1 && lane_ == 0) init();
  }

  // Gives each warp its role: produce(warp) or consume(warpgroup, warp in it).
  template <class Produce, class Consume>
  FFPA_DEVICE void run_roles(const Produce& produce, const Consume& consume) const {
    if constexpr (kProducers == 1) {
      tile::run_roles<Config>(warp_, [&] { produce(0); }, consume);
    } else {
      tile::run_roles<Config, kProducers>(warp_, produce, consume);
    }
  }

  FFPA_DEVICE auto item_queue() const { return typename Config::Items(smem_ + offsetof(Smem, items)); }
  FFPA_DEVICE auto queries() const {
    return typename Config::Queries{smem_ + uint32_t(offsetof(Smem, q)), smem_ + uint32_t(offsetof(Smem, q_barriers))};
  }

  // The warp that takes items calls this. has_keys(rows) says whether the row tile's part of the keys holds any. Parts
  // without keys end here, ahead of the warps that multiply: their rows get sums of zero, and nobody reads their O.
  template <class HasKeys>
  FFPA_DEVICE int take_item(typename Config::Items& items, void* counter_gmem, const HasKeys& has_keys) const {
    return items.take(counter_gmem, arguments_.row_tiles.count(), lane_, [&](int item) {
      if (params_.splits == 1) return false;
      const SharedRowTile rows = arguments_.row_tiles.get(params_, item);
      if (has_keys(rows)) return false;
      FFPA_NO_UNROLL
      for (int row = lane_; row < rows.count(); row += 32) {
        finish_row(params_, rows, row, -kInfinity, -kInfinity, 0, true);
      }
      return true;
    });
  }

  // Returns the keys of the row tile that a warp keeps, as one that brings them takes them.
  FFPA_DEVICE auto keys_of(const KeptRows& kept) const {
    if constexpr (Config::kPaged) {
      return KeysOfPages<kProducers>(params_, arguments_.pages, kept, warp_);
    } else {
      return KeysOfTensor(params_, place_of_keys(params_, kept.get()));
    }
  }

  // Each warp that produces calls this. For each row tile that next() gives, the first of them brings Q, and all call
  // function(rows, keys), which brings the visible keys.
  template <class Next, class Function>
  FFPA_DEVICE void bring_row_tiles(int producer, const Next& next, const Function& function) const {
    const KeptRows kept = kept_rows(producer);
    uint32_t parity = 1;
    for_each_row_tile(params_, arguments_.row_tiles, kept, lane_, next, [&] {
      const SharedRowTile rows = kept.get();
      if (producer == 0) queries().bring_tile(arguments_.q, params_, rows, parity);
      parity ^= 1;
      auto keys = keys_of(kept);
      function(rows, keys);
    });
  }

  const Arguments& arguments_;
  const AttentionParams& params_;
  int lane_, warp_;
  uint32_t smem_;
};

}  // namespace ffpa
