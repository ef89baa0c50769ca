// Emulated side of ptx/native/mbarrier.cuh.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/mbarrier.h"

namespace ffpa::ptx {

inline void mbarrier_init(uint32_t barrier_smem, uint32_t arrivals, emu::CallSite site = emu::CallSite()) {
  emu::mbarrier_init(barrier_smem, arrivals, site);
}

// The race check asks for a barrier between initialisation and use; it has no way to see this fence.
inline void fence_mbarrier_init() {}

inline void mbarrier_arrive(uint32_t barrier_smem, emu::CallSite site = emu::CallSite()) {
  emu::mbarrier_arrive(barrier_smem, site);
}

inline void mbarrier_arrive_remote(uint32_t barrier_smem, uint32_t rank, emu::CallSite site = emu::CallSite()) {
  emu::mbarrier_arrive(emu::remote_address(barrier_smem, rank, site), site);
}

inline void mbarrier_arrive_expect_tx(uint32_t barrier_smem, uint32_t bytes, emu::CallSite site = emu::CallSite()) {
  emu::mbarrier_arrive_expect_bytes(barrier_smem, bytes, site);
}

inline void mbarrier_wait(uint32_t barrier_smem, uint32_t parity, emu::CallSite site = emu::CallSite()) {
  emu::mbarrier_wait(barrier_smem, parity, site);
}

}  // namespace ffpa::ptx
