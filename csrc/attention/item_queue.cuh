// The way of work items from the warp that takes them, one after the other from a counter that all blocks share, to the
// warps that work on them. Whoever is free takes the next: no block waits for a longer item of another, and which block
// has which changes no result.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace ffpa {

// Two places in shared memory. `full`: the item is there; `empty`: all warps have read it.
class ItemQueue {
  static constexpr int kPlaces = 2;

 public:
  static constexpr uint32_t kBytes = kPlaces * (2 * 8 + 4);

  FFPA_DEVICE explicit ItemQueue(uint32_t smem) : smem_(smem) {}

  // By one thread, before a barrier of the block.
  FFPA_DEVICE void init(int reading_warps) const {
    for (int place = 0; place < kPlaces; ++place) {
      ptx::mbarrier_init(full(place), 1);
      ptx::mbarrier_init(empty(place), reading_warps);
    }
  }

  // By all lanes of a warp: the next item, also for the others.
  FFPA_DEVICE int take(void* counter_gmem, int lane) {
    uint32_t item = 0;
    if (lane == 0) {
      item = ptx::atom_add_global(counter_gmem, 1);
      ptx::mbarrier_wait(empty(place()), parity() ^ 1);
      ptx::st_shared_4(item_of(place()), item);
      ptx::mbarrier_arrive(full(place()));
    }
    ++items_;
    return int(ptx::shfl_idx(item, 0));
  }

  // By all lanes of each other warp.
  FFPA_DEVICE int get(int lane) {
    ptx::mbarrier_wait(full(place()), parity());
    const uint32_t item = ptx::shfl_idx(ptx::ld_shared_4(item_of(place())), 0);  // the compiler knows: one value
    if (lane == 0) ptx::mbarrier_arrive(empty(place()));
    ++items_;
    return int(item);
  }

 private:
  FFPA_DEVICE int place() const { return items_ % kPlaces; }
  FFPA_DEVICE uint32_t parity() const { return items_ / kPlaces % 2; }

  FFPA_DEVICE uint32_t full(int place) const { return smem_ + place * 8; }
  FFPA_DEVICE uint32_t empty(int place) const { return full(kPlaces + place); }
  FFPA_DEVICE uint32_t item_of(int place) const { return full(2 * kPlaces) + place * 4; }

  uint32_t smem_;
  uint32_t items_ = 0;  // that have passed
};

}  // namespace ffpa
