// Emulated side of ptx/native/async_copy.cuh.
#pragma once

#include <cstdint>

#include "ptx/emulated/call_site.cuh"

namespace ffpa::emu {
void wait_for_copies(int pending_groups);
}  // namespace ffpa::emu

namespace ffpa::ptx {

void cp_async_16(uint32_t destination_smem, const void* source_gmem, int source_bytes = 16, CallSite site = CallSite());
void cp_async_16_or_zero(bool exists, uint32_t destination_smem, const void* source_gmem, CallSite site = CallSite());
void cp_async_4(uint32_t destination_smem, const void* source_gmem, int source_bytes = 4, CallSite site = CallSite());

void cp_async_commit_group();

template <int kPending>
inline void cp_async_wait_group() {
  emu::wait_for_copies(kPending);
}

void cp_async_wait_all();

void cp_async_mbarrier_arrive(uint32_t barrier_smem, CallSite site = CallSite());

}  // namespace ffpa::ptx
