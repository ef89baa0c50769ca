// WgmmaBlock is what the persistent forwards on wgmma have in common: the arguments of their kernel, and where a block
// has what in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "attention/rows/row_tiles.cuh"
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
  // Each warp that works calls this before the block's first barrier, while a warp that has no work calls init(): it
  // keeps the row tile that the block begins with.
  template <class Init>
  FFPA_DEVICE void begin(const Init& init) const {
    constexpr int kProducers = int(sizeof(Smem::kept) / sizeof(Smem::kept[0])) - tile::kConsumerWarps;
    static_assert(kProducers < tile::kGroupWarps, "a warp has no other work");
    const bool multiplies = warp_ >= tile::kGroupWarps;
    if (multiplies || warp_ < kProducers) {
      const int keeper = multiplies ? kProducers + warp_ - tile::kGroupWarps : warp_;
      kept_rows(keeper).keep(arguments_.row_tiles.get(params_, Config::Items::first()), lane_);
    } else if (warp_ == kProducers && lane_ == 0) {
      init();
    }
  }

  FFPA_DEVICE auto item_queue() const { return typename Config::Items(smem_ + offsetof(Smem, items)); }
  FFPA_DEVICE auto queries() const {
    return typename Config::Queries{smem_ + uint32_t(offsetof(Smem, q)), smem_ + uint32_t(offsetof(Smem, q_barriers))};
  }

  // The producer's warp calls this. For each row tile that next() gives, it brings Q, and calls function(rows, place),
  // which brings the visible keys, from `place` on.
  template <class Next, class Function>
  FFPA_DEVICE void bring_row_tiles(const Next& next, const Function& function) const {
    const KeptRows kept = kept_rows(0);
    uint32_t parity = 1;
    for_each_row_tile(params_, arguments_.row_tiles, kept, lane_, next, [&] {
      const SharedRowTile rows = kept.get();
      queries().bring_tile(arguments_.q, params_, rows, parity);
      parity ^= 1;
      function(rows, place_of_keys(params_, rows));
    });
  }

  const Arguments& arguments_;
  const AttentionParams& params_;
  int lane_, warp_;
  uint32_t smem_;
};

}  // namespace ffpa
