// A ring of 1 … 4 slots of shared memory, which all threads of a block fill with cp.async and all use. Each slot has
// two mbarriers, so that nobody waits for more than is needed:
//
//   full    every thread's copies into the slot have landed: all may read it;
//   empty   every thread has read it: all may fill it again. (One arrival a warp would do, at the same speed; but tools
//           that look for races do not see that the other lanes read before it.)
//
// The number of slots is known at run time only. Fills and uses each go round the ring in order.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "ptx/instructions.cuh"

namespace ffpa::tile {

inline constexpr int kMaxStages = 4;

template <int kThreads>
class StageRing {
 public:
  static constexpr uint32_t kBarrierBytes = 2 * kMaxStages * 8;

  FFPA_DEVICE StageRing(uint32_t barriers_smem, uint32_t slots_smem, int stages, uint32_t slot_bytes)
      : barriers_smem_(barriers_smem), slots_smem_(slots_smem), stages_(stages), slot_bytes_(slot_bytes) {}

  // Every thread calls this, before a barrier of the block.
  FFPA_DEVICE void init(int thread) const {
    if (thread > 0) return;
    FFPA_NO_UNROLL
    for (int slot = 0; slot < stages_; ++slot) {
      ptx::mbarrier_init(full(slot), kThreads);
      ptx::mbarrier_init(empty(slot), kThreads);
    }
  }

  // Returns how many slots are filled ahead of the one in use. With three or more slots, one is neither filled ahead
  // nor in use: a warp may then be a whole step behind the others before they wait for it.
  FFPA_DEVICE int ahead() const { return stages_ <= 2 ? stages_ - 1 : stages_ - 2; }

  // Returns the slot to fill next, once all threads have read what lay there.
  FFPA_DEVICE uint32_t begin_fill() {
    if (filled_round_ > 0) ptx::mbarrier_wait(empty(fill_), (filled_round_ & 1) ^ 1);
    return slots_smem_ + fill_ * slot_bytes_;
  }

  // The slot is full when the copies that this thread has started so far, and those of all others, have landed.
  FFPA_DEVICE void end_fill() {
    ptx::cp_async_mbarrier_arrive(full(fill_));
    if (++fill_ == stages_) {
      fill_ = 0;
      ++filled_round_;
    }
  }

  // Returns the slot to use next, once it is full.
  FFPA_DEVICE uint32_t begin_use() const {
    ptx::mbarrier_wait(full(use_), used_parity_);
    return slots_smem_ + use_ * slot_bytes_;
  }

  // Returns the slot after the one in use, once it is full, while that one is still in use.
  FFPA_DEVICE uint32_t begin_next_use() const {
    const bool wraps = use_ + 1 == stages_;
    const int slot = wraps ? 0 : use_ + 1;
    ptx::mbarrier_wait(full(slot), used_parity_ ^ uint32_t(wraps));
    return slots_smem_ + slot * slot_bytes_;
  }

  // All lanes of a warp call this together, so that they arrive in one instruction: none reads the slot any more.
  FFPA_DEVICE void end_use() {
    ptx::sync_warp();
    ptx::mbarrier_arrive(empty(use_));
    if (++use_ == stages_) {
      use_ = 0;
      used_parity_ ^= 1;
    }
  }

 private:
  FFPA_DEVICE uint32_t full(int slot) const { return barriers_smem_ + slot * 8; }
  FFPA_DEVICE uint32_t empty(int slot) const { return barriers_smem_ + (kMaxStages + slot) * 8; }

  uint32_t barriers_smem_;
  uint32_t slots_smem_;
  int stages_;
  uint32_t slot_bytes_;
  int fill_ = 0, use_ = 0;
  int filled_round_ = 0;
  uint32_t used_parity_ = 0;
};

}  // namespace ffpa::tile
