// Passes tiles from the warp that finds them to the warpgroups that multiply, and to the warp that brings operands. One
// warp does the arithmetic that finds a tile, while the others work on earlier ones, and leaves its numbers in shared
// memory: registers belong to sums, and a ring runs empty while nobody brings.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "ptx/instructions.cuh"

namespace ffpa {

// Numbers of a tile in shared memory. All lanes of a warp read them together, through a shuffle: so the compiler knows
// that they have one value.
template <int kCount>
class KeptNumbers {
 public:
  using Numbers = int[kCount];
  static constexpr uint32_t kBytes = (kCount + 4) / 4 * 16;

  FFPA_DEVICE explicit KeptNumbers(uint32_t smem) : smem_(smem) {}

  // One thread calls these; keep_end() says that no more tiles come.
  FFPA_DEVICE void keep(const Numbers& numbers) const {
    ptx::st_shared_4(smem_, 1);
    FFPA_UNROLL
    for (int i = 0; i < kCount; ++i) ptx::st_shared_4(smem_ + 4 + 4 * i, uint32_t(numbers[i]));
  }
  FFPA_DEVICE void keep_end() const { ptx::st_shared_4(smem_, 0); }

  FFPA_DEVICE bool exists() const { return number(-1) != 0; }

 protected:
  FFPA_DEVICE int number(int i) const { return int(ptx::shfl_idx(ptx::ld_shared_4(smem_ + 4 + 4 * i), 0)); }

 private:
  uint32_t smem_;
};

// Shared memory has four places, so that the warp that finds tiles is ahead, and a tile stays in one while it is worked
// on. A place has two mbarriers: `full` says that its tile is there, `empty` that all warps that read tiles are done
// with the last one. Kept is a KeptNumbers.
template <class Kept>
class TileQueue {
 public:
  static constexpr int kPlaces = 4;
  static constexpr uint32_t kBytes = kPlaces * (Kept::kBytes + 2 * 8);

  FFPA_DEVICE explicit TileQueue(uint32_t smem) : smem_(smem) {}

  // One thread calls this, before a barrier of the block.
  FFPA_DEVICE void init(int reading_warps) const {
    for (int place = 0; place < kPlaces; ++place) {
      ptx::mbarrier_init(full(place), 1);
      ptx::mbarrier_init(empty(place), reading_warps);
    }
  }

  // One thread calls these.
  FFPA_DEVICE void put(const typename Kept::Numbers& numbers) {
    put_by([&](const Kept& kept) { kept.keep(numbers); });
  }
  FFPA_DEVICE void put_end() {
    put_by([](const Kept& kept) { kept.keep_end(); });
  }

  // The thread that puts tiles calls this: it waits until no more than the last `left` of them are left.
  FFPA_DEVICE void wait_for_all_but(uint32_t left) const {
    if (tiles_ <= left) return;
    const uint32_t tile = tiles_ - left - 1;
    ptx::mbarrier_wait(empty(tile % kPlaces), tile / kPlaces % 2);
  }

  // Whole warps call get() and release().
  FFPA_DEVICE Kept get() const {
    ptx::mbarrier_wait(full(place()), parity());
    return Kept(of_place());
  }
  FFPA_DEVICE void release(int lane) {
    ptx::sync_warp();
    if (lane == 0) ptx::mbarrier_arrive(empty(place()));
    ++tiles_;
  }

 private:
  FFPA_DEVICE int place() const { return tiles_ % kPlaces; }
  FFPA_DEVICE uint32_t parity() const { return tiles_ / kPlaces % 2; }

  FFPA_DEVICE uint32_t of_place() const { return smem_ + place() * Kept::kBytes; }
  FFPA_DEVICE uint32_t full(int place) const { return smem_ + kPlaces * Kept::kBytes + place * 8; }
  FFPA_DEVICE uint32_t empty(int place) const { return full(kPlaces + place); }

  template <class Keep>
  FFPA_DEVICE void put_by(const Keep& keep) {
    ptx::mbarrier_wait(empty(place()), parity() ^ 1);
    keep(Kept(of_place()));
    ptx::mbarrier_arrive(full(place()));
    ++tiles_;
  }

  uint32_t smem_;
  uint32_t tiles_ = 0;  // number of tiles that have passed
};

}  // namespace ffpa
