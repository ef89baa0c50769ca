// The way of work items from the warp that takes them, one after the other from a counter that all blocks share, to the
// warps that work on them. Whoever is free takes the next: no block waits for a longer item of another, and which block
// has which changes no result.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"

namespace ffpa {

// Two places in shared memory. `full`: the item is there; `empty`: all warps have read it. Two blocks of a cluster can
// have the same items: block 0 takes them, and copies each to the other block, whose warps say there that they have
// read it.
template <int kBlocks = 1>
class ItemQueue {
  static_assert(kBlocks <= 2, "block 0 copies to one other");
  static constexpr int kPlaces = 2;
  static constexpr uint32_t kItemBytes = kBlocks == 1 ? 4 : 16;  // the least that a copy takes

 public:
  static constexpr uint32_t kBytes = kPlaces * (2 * 8 + kItemBytes);

  FFPA_DEVICE explicit ItemQueue(uint32_t smem) : smem_(smem) {}

  // By one thread, before a barrier of the block, or of the cluster. `reading_warps`: of all blocks.
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
      if constexpr (kBlocks > 1) {
        ptx::fence_proxy_async();
        ptx::copy_to_block(item_of(place()), item_of(place()), kItemBytes, full(place()), 1);
      }
      ptx::mbarrier_arrive(full(place()));
    }
    ++items_;
    return int(ptx::shfl_idx(item, 0));
  }

  // By one warp of block 1, before it gets the item.
  FFPA_DEVICE void expect(int lane) const {
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(full(place()), kItemBytes);
  }

  // By all lanes of each other warp.
  FFPA_DEVICE int get(int lane) {
    ptx::mbarrier_wait(full(place()), parity());
    const uint32_t item = ptx::shfl_idx(ptx::ld_shared_4(item_of(place())), 0);  // the compiler knows: one value
    if (lane == 0) {
      if constexpr (kBlocks == 1) {
        ptx::mbarrier_arrive(empty(place()));
      } else {
        ptx::mbarrier_arrive_remote(empty(place()), 0);
      }
    }
    ++items_;
    return int(item);
  }

 private:
  FFPA_DEVICE int place() const { return items_ % kPlaces; }
  FFPA_DEVICE uint32_t parity() const { return items_ / kPlaces % 2; }

  FFPA_DEVICE uint32_t full(int place) const { return smem_ + place * 8; }
  FFPA_DEVICE uint32_t empty(int place) const { return full(kPlaces + place); }
  FFPA_DEVICE uint32_t item_of(int place) const { return full(2 * kPlaces) + place * kItemBytes; }

  uint32_t smem_;
  uint32_t items_ = 0;  // that have passed
};

}  // namespace ffpa
