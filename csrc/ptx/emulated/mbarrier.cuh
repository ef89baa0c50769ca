// Emulated side of ptx/native/mbarrier.cuh.
#pragma once

#include <cstdint>

#include "ptx/emulated/call_site.cuh"

namespace ffpa::ptx {

void mbarrier_init(uint32_t barrier_smem, uint32_t arrivals, CallSite site = CallSite());

// The race check asks for a barrier between initialisation and use; it has no way to see this fence.
inline void fence_mbarrier_init() {}

void mbarrier_arrive(uint32_t barrier_smem, CallSite site = CallSite());
void mbarrier_arrive_remote(uint32_t barrier_smem, uint32_t rank, CallSite site = CallSite());
void mbarrier_arrive_expect_tx(uint32_t barrier_smem, uint32_t bytes, CallSite site = CallSite());
void mbarrier_wait(uint32_t barrier_smem, uint32_t parity, CallSite site = CallSite());

}  // namespace ffpa::ptx
