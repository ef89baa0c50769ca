// Row tiles of a persistent forward, in the order in which blocks take them.
#pragma once

#include <cstdint>

#include "attention/attention_params.h"
#include "attention/head_rows.cuh"
#include "attention/row_block.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/warp.cuh"
#include "tile/kept_value.cuh"

namespace ffpa {

// Whoever is free takes the next: head by head, so that blocks share K and V in the
// L2 cache; within heads whose K and V it holds together, the longest first under a causal mask.
class RowTiles {
 public:
  FFPA_HOST_DEVICE RowTiles(const AttentionParams& params, int rows)
      : heads_kv_(params.heads_q / params.group),
        group_(params.group),
        rows_(rows),
        tiles_(ceil_div(params.n_q, rows)),
        entries_(params.batch * heads_kv_) {
    const int64_t bytes = int64_t(params.n_k) * (int64_t(params.d_qk) + params.d_v) * 2;  // of K and V of an entry
    together_ = int(clamp(kCachedBytes / max_of(bytes, int64_t{1}), int64_t{1}, int64_t{max_of(entries_, 1)}));
  }

  // Of packed sequences as if all were the longest. That 32 bits are enough, also for what blocks take beyond the last
  // one, row_tiles.py makes sure.
  FFPA_HOST_DEVICE int count() const { return entries_ * group_ * tiles_; }

  FFPA_DEVICE HeadRows get(const AttentionParams& params, int item) const {
    const int items_of_section = together_ * group_ * tiles_, section = item / items_of_section;
    const int heads = min_of(together_, entries_ - section * together_) * group_;
    const int in_section = item % items_of_section;
    const int head = section * together_ * group_ + in_section % heads;  // of all query heads
    HeadRows rows;
    rows.batch_index = head / (heads_kv_ * group_);
    rows.head_index = head % (heads_kv_ * group_);
    rows.entry = batch_entry(params, rows.batch_index);
    rows.first = (tiles_ - 1 - in_section / heads) * rows_;
    rows.last = min_of(rows.first + rows_, rows.n_q()) - 1;
    return rows;
  }

 private:
  static constexpr int64_t kCachedBytes = 32 << 20;

  int heads_kv_, group_, rows_, tiles_, entries_, together_;
};

using KeptRows = tile::KeptValue<HeadRows>;

// function() for the row tiles that the block takes: `next` says which. The rows are kept, of which there are too many
// registers full.
template <class Next, class Function>
FFPA_DEVICE void for_each_row_tile(const AttentionParams& params, int rows_of_tile, const KeptRows& kept, int lane,
                                   const Next& next, const Function& function) {
  const RowTiles tiles(params, rows_of_tile);
  FFPA_NO_UNROLL
  for (int item = next(); item < tiles.count(); item = next()) {
    const HeadRows rows = tiles.get(params, item);
    if (rows.first > rows.last) continue;
    ptx::sync_warp();  // all lanes have done with those before
    kept.keep(rows, lane);
    function();
  }
}

}  // namespace ffpa
