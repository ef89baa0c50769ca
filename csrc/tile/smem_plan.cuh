// Plans of a block's shared memory are structs: their size is sizeof, and the places in them are offsetof.
#pragma once

#include <cstdint>

#include "tile/smem_layout.cuh"

namespace ffpa::tile {

// SmemBytes are bytes of a plan that begin at a multiple of kAlign.
template <uint32_t kCount, uint32_t kAlign = 16>
struct alignas(kAlign) SmemBytes {
  uint8_t bytes[kCount];
};

// These are the slots of a ring of boxes, and mbarriers.
template <class Ring>
using SmemSlots = SmemBytes<Ring::kBytes, 1024>;
template <uint32_t kCount>
using SmemBarriers = SmemBytes<kCount, 8>;

// Returns the most slots, but no more than kMost, with which Plan<slots> fits a block.
template <template <int> class Plan, int kMost>
constexpr int most_slots() {
  static_assert(kMost > 1, "a ring has two slots at least");
  if constexpr (sizeof(Plan<kMost>) <= kMostSmemBytes) {
    return kMost;
  } else {
    return most_slots<Plan, kMost - 1>();
  }
}

}  // namespace ffpa::tile
