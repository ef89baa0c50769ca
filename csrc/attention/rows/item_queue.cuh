// The queue passes work items from the warp that takes them to the warps that work on them. A block, or cluster, begins
// with the item of its own number, which all its warps know; the others come one after the other from a counter that
// all blocks share. A block that is free takes the next item: none waits for a longer item of another. Which block has
// which item changes no result.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "ptx/instructions.cuh"

namespace ffpa {

// The queue has two places in shared memory, with two mbarriers each: `full` says that the item is there, `empty` that
// all warps have read it. Two blocks of a cluster can have the same items: block 0 takes them and copies each to block
// 1, whose warps tell block 0 that they have read it.
template <int kBlocks = 1>
class ItemQueue {
  static_assert(kBlocks <= 2, "block 0 copies to one other");
  static constexpr int kPlaces = 2;
  static constexpr uint32_t kItemBytes = kBlocks == 1 ? 4 : 16;  // 16 bytes is the smallest copy to another block

 public:
  static constexpr uint32_t kBytes = kPlaces * (2 * 8 + kItemBytes);

  FFPA_DEVICE explicit ItemQueue(uint32_t smem) : smem_(smem) {}

  // Returns the item that the block begins with.
  static FFPA_DEVICE int first() { return ptx::block_x() / kBlocks; }

  // One thread calls this, before a barrier of the block or cluster. `reading_warps` counts those of all blocks.
  FFPA_DEVICE void init(int reading_warps) const {
    for (int place = 0; place < kPlaces; ++place) {
      ptx::mbarrier_init(full(place), 1);
      ptx::mbarrier_init(empty(place), reading_warps);
    }
  }

  // Takes the next of `count` items, or one beyond them, for a warp that passes it to nobody; all of its lanes call
  // this. Nobody touches the counter where the items that blocks begin with are all there are (persistent_shape()).
  static FFPA_DEVICE int next(void* counter_gmem, int count, int lane) {
    uint32_t item = 0;
    if (lane == 0) {
      item = ptx::grid_x() / kBlocks;
      if (int(item) < count) item += ptx::atom_add_global(counter_gmem, 1);
    }
    return int(ptx::shfl_idx(item, 0));
  }

  // All lanes of one warp call this: it takes the next of `count` items for which ends(item) is false, or one beyond
  // them, and passes it to the other warps. ends(item) may finish an item itself, and then returns true.
  template <class Ends>
  FFPA_DEVICE int take(void* counter_gmem, int count, int lane, const Ends& ends) {
    int item;
    do {
      item = next(counter_gmem, count, lane);
    } while (item < count && ends(item));
    if (lane == 0) {
      ptx::mbarrier_wait(empty(place()), parity() ^ 1);
      ptx::st_shared_4(item_of(place()), uint32_t(item));
      if constexpr (kBlocks > 1) {
        ptx::fence_proxy_async();
        ptx::copy_to_block(item_of(place()), item_of(place()), kItemBytes, full(place()), 1);
      }
      ptx::mbarrier_arrive(full(place()));
    }
    ++items_;
    return item;
  }
  FFPA_DEVICE int take(void* counter_gmem, int count, int lane) {
    return take(counter_gmem, count, lane, [](int) { return false; });
  }

  // One warp of block 1 calls this, before it gets the item.
  FFPA_DEVICE void expect(int lane) const {
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(full(place()), kItemBytes);
  }

  // All lanes of each other warp call this to get the item.
  FFPA_DEVICE int get(int lane) {
    ptx::mbarrier_wait(full(place()), parity());
    // The shuffle tells the compiler that all lanes have one value.
    const uint32_t item = ptx::shfl_idx(ptx::ld_shared_4(item_of(place())), 0);
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
  uint32_t items_ = 0;  // number of items that have passed
};

}  // namespace ffpa
