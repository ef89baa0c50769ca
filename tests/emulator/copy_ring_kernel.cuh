// A ring of cp.async stages on mbarriers, as sm_80 can have it: all threads fill slots, ahead of their use, and all
// read them. `bug` spoils one piece.
//
// Each slot has two mbarriers. On the full one every thread arrives when its copies have landed. On the empty one, one
// lane of every warp arrives when the warp has read the slot.
#pragma once

#include "base/math.h"
#include "launch/launch.cuh"
#include "ptx/instructions.cuh"
#include "tile/stage_ring.cuh"

namespace ffpa::testing {

enum class RingBug : int {
  kNone,
  kNoFullWait,
  kFullWaitInFirstRoundOnly,
  kNoEmptyWait,
  kWrongFullParity,
  kWrongEmptyParity,
  kWaitsForAnotherSlot,
  kArrivesBeforeItsCopy,
  kOrdinaryArrival,        // mbarrier.arrive, which does not wait for the copies
  kOneLaneArrivesForWarp,  // cp.async.mbarrier.arrive tracks the copies of its own lane
  kOneThreadNeverArrives,
  kOneWarpNeverReleases,
  kOneThreadArrivesTwice,
  kNoSyncAfterInit,
  kOneStepTooMany,  // the last step is filled, and never used
};

// A position that goes round a ring of slots, and the number of its rounds modulo 2.
class RingPosition {
 public:
  FFPA_DEVICE RingPosition(int slots, uint32_t slot_bytes) : slots_(slots), slot_bytes_(slot_bytes) {}

  FFPA_DEVICE int index() const { return index_; }
  FFPA_DEVICE uint32_t parity() const { return parity_; }
  FFPA_DEVICE uint32_t offset() const { return index_ * slot_bytes_; }

  FFPA_DEVICE void advance() {
    if (++index_ == slots_) {
      index_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  int slots_;
  uint32_t slot_bytes_;
  int index_ = 0;
  uint32_t parity_ = 0;
};

// `input` is [1 + steps][thread][4 words]; its first words stay for all steps. `output` is [steps][thread][4 words]:
// twice the step's words of the opposite thread, plus its words that stay, plus how often the ring has come round
// modulo 2.
template <int kThreads>
FFPA_KERNEL(kThreads, 1)
void copy_ring_kernel(const uint32_t* input, uint32_t* output, int steps, int slots, RingBug bug) {
  constexpr uint32_t kSlotBytes = kThreads * 16;
  constexpr int kWarps = kThreads / 32;
  const int thread = ptx::thread_x();
  const int lane = ptx::lane_id();
  const uint32_t full = ptx::dynamic_smem();           // [kMaxStages] mbarriers
  const uint32_t empty = full + 8 * tile::kMaxStages;  // [kMaxStages]
  const uint32_t resident = full + 128;
  const uint32_t slots_smem = resident + kSlotBytes;
  const uint32_t mine = thread * 16, opposite = (kThreads - 1 - thread) * 16;

  if (thread == 0) {
    for (int slot = 0; slot < slots; ++slot) {
      ptx::mbarrier_init(full + 8 * slot, bug == RingBug::kOneLaneArrivesForWarp ? kWarps : kThreads);
      ptx::mbarrier_init(empty + 8 * slot, kWarps);
    }
    ptx::fence_mbarrier_init();
  }
  if (bug != RingBug::kNoSyncAfterInit) ptx::sync_block();

  ptx::cp_async_16_or_zero(true, resident + mine, input + thread * 4);
  ptx::cp_async_commit_group();

  RingPosition filling(slots, kSlotBytes);
  const auto fill = [&](int step) {
    if (step >= steps + (bug == RingBug::kOneStepTooMany)) return;
    const uint32_t full_slot = full + 8 * filling.index();
    if (bug != RingBug::kNoEmptyWait) {
      ptx::mbarrier_wait(empty + 8 * filling.index(), filling.parity() ^ (bug != RingBug::kWrongEmptyParity));
    }
    if (bug == RingBug::kArrivesBeforeItsCopy) ptx::cp_async_mbarrier_arrive(full_slot);
    const int source_row = 1 + min_of(step, steps - 1);
    ptx::cp_async_16_or_zero(true, slots_smem + filling.offset() + mine, input + (source_row * kThreads + thread) * 4);
    if (bug == RingBug::kOrdinaryArrival) {
      ptx::mbarrier_arrive(full_slot);
    } else if (bug == RingBug::kOneLaneArrivesForWarp) {
      ptx::sync_warp();
      if (lane == 0) ptx::cp_async_mbarrier_arrive(full_slot);
    } else if (bug != RingBug::kArrivesBeforeItsCopy && !(bug == RingBug::kOneThreadNeverArrives && thread == 0)) {
      ptx::cp_async_mbarrier_arrive(full_slot);
    }
    if (bug == RingBug::kOneThreadArrivesTwice && thread == 0) ptx::cp_async_mbarrier_arrive(full_slot);
    filling.advance();
  };
  for (int step = 0; step < slots - 1; ++step) fill(step);

  // The copies that stay belong to the only group; the ring's belong to none, so this does not wait for them.
  ptx::cp_async_wait_group<0>();
  ptx::sync_block();
  uint32_t kept[4];
  ptx::ld_shared_16(kept, resident + opposite);

  RingPosition reading(slots, kSlotBytes);
  for (int step = 0; step < steps; ++step) {
    fill(step + slots - 1);
    const bool first_round = step < slots;
    if (bug != RingBug::kNoFullWait && (first_round || bug != RingBug::kFullWaitInFirstRoundOnly)) {
      const int slot = bug == RingBug::kWaitsForAnotherSlot ? 0 : reading.index();
      ptx::mbarrier_wait(full + 8 * slot, reading.parity() ^ (bug == RingBug::kWrongFullParity));
    }
    uint32_t value[4];
    ptx::ld_shared_16(value, slots_smem + reading.offset() + opposite);
    for (int i = 0; i < 4; ++i) value[i] = 2 * value[i] + kept[i] + reading.parity();
    ptx::st_global_16(output + (step * kThreads + thread) * 4, value);
    ptx::sync_warp();  // all lanes have read
    const bool releases = lane == 0 && !(bug == RingBug::kOneWarpNeverReleases && thread == 0);
    if (releases) ptx::mbarrier_arrive(empty + 8 * reading.index());
    reading.advance();
  }
}

template <int kThreads>
LaunchStatus run_copy_ring(const uint32_t* input, uint32_t* output, int steps, int slots,
                           RingBug bug = RingBug::kNone) {
  LaunchShape shape;
  shape.threads = kThreads;
  shape.smem_bytes = 128 + (1 + slots) * kThreads * 16;
  return launch(shape, nullptr, copy_ring_kernel<kThreads>, input, output, steps, slots, bug);
}

}  // namespace ffpa::testing
