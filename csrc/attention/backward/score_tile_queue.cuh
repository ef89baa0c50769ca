// The queue passes tiles of P and dS from the warp that brings their operands to the warpgroups that multiply. A tile
// stays in one of two places in shared memory while it is worked on: registers belong to sums, and one warp does the
// arithmetic that finds a tile.
#pragma once

#include <cstdint>

#include "attention/backward/tiles.cuh"
#include "attention/params/backward_params.h"
#include "attention/rows/visible_keys.cuh"
#include "base/compiler.h"
#include "ptx/instructions.cuh"

namespace ffpa {

// A score tile in shared memory. All lanes of a warp read it together, through a shuffle: so the compiler knows that
// they have one value.
class KeptScoreTile {
 public:
  static constexpr uint32_t kBytes = 64;

  FFPA_DEVICE explicit KeptScoreTile(uint32_t smem) : smem_(smem) {}

  // One thread calls this; null says that no more tiles come.
  FFPA_DEVICE void keep(const ScoreTile* tile) const {
    ptx::st_shared_4(smem_, tile != nullptr);
    if (tile == nullptr) return;
    const RowTile& rows = tile->rows;
    const int numbers[] = {rows.batch(),     rows.head(),     rows.first_row(),         rows.last_row(),
                           rows.n_q(),       rows.n_k(),      rows.nearest(),           rows.farthest(),
                           rows.q_begin(),   tile->first_key, int(tile->workspace_row), tile->workspace_column,
                           tile->is_computed};
    FFPA_UNROLL
    for (int i = 0; i < 13; ++i) ptx::st_shared_4(smem_ + 4 + 4 * i, uint32_t(numbers[i]));
  }

  FFPA_DEVICE bool exists() const { return number(-1) != 0; }
  FFPA_DEVICE int batch() const { return number(0); }
  FFPA_DEVICE int head() const { return number(1); }
  FFPA_DEVICE int first_row() const { return number(2); }
  FFPA_DEVICE int last_row() const { return number(3); }
  FFPA_DEVICE int n_q() const { return number(4); }
  FFPA_DEVICE int n_k() const { return number(5); }
  FFPA_DEVICE int nearest() const { return number(6); }
  FFPA_DEVICE int farthest() const { return number(7); }
  FFPA_DEVICE int q_begin() const { return number(8); }
  FFPA_DEVICE int first_key() const { return number(9); }
  FFPA_DEVICE int workspace_row() const { return number(10); }
  FFPA_DEVICE int workspace_column() const { return number(11); }
  FFPA_DEVICE bool is_computed() const { return number(12) != 0; }

  // Says whether all rows of the tile exist and see all of its keys.
  FFPA_DEVICE bool all_seen() const {
    return all_rows_see(*this, first_key(), kKeyTile) && last_row() - first_row() == kScoreRows - 1;
  }

 private:
  FFPA_DEVICE int number(int i) const { return int(ptx::shfl_idx(ptx::ld_shared_4(smem_ + 4 + 4 * i), 0)); }

  uint32_t smem_;
};

// A place has two mbarriers: `full` says that its tile is there, `empty` that all warps are done with the last one.
class ScoreTileQueue {
 public:
  static constexpr int kPlaces = 2;
  static constexpr uint32_t kBytes = kPlaces * (KeptScoreTile::kBytes + 2 * 8);

  FFPA_DEVICE explicit ScoreTileQueue(uint32_t smem) : smem_(smem) {}

  // One thread calls this, before a barrier of the block.
  FFPA_DEVICE void init(int consuming_warps) const {
    for (int place = 0; place < kPlaces; ++place) {
      ptx::mbarrier_init(full(place), 1);
      ptx::mbarrier_init(empty(place), consuming_warps);
    }
  }

  // One thread calls this.
  FFPA_DEVICE void put(const ScoreTile* tile) {
    ptx::mbarrier_wait(empty(place_), parity_ ^ 1);
    KeptScoreTile(of_place()).keep(tile);
    ptx::mbarrier_arrive(full(place_));
    advance();
  }

  // Whole warps call get() and release().
  FFPA_DEVICE KeptScoreTile get() const {
    ptx::mbarrier_wait(full(place_), parity_);
    return KeptScoreTile(of_place());
  }
  FFPA_DEVICE void release(int lane) {
    ptx::sync_warp();
    if (lane == 0) ptx::mbarrier_arrive(empty(place_));
    advance();
  }

 private:
  FFPA_DEVICE uint32_t of_place() const { return smem_ + place_ * KeptScoreTile::kBytes; }
  FFPA_DEVICE uint32_t full(int place) const { return smem_ + kPlaces * KeptScoreTile::kBytes + place * 8; }
  FFPA_DEVICE uint32_t empty(int place) const { return full(kPlaces + place); }

  FFPA_DEVICE void advance() {
    place_ ^= 1;
    if (place_ == 0) parity_ ^= 1;
  }

  uint32_t smem_;
  int place_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace ffpa
