// Emulated side of ptx/native/async_copy.cuh.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/mbarrier.h"
#include "ptx/emulated/machine/memory_ops.h"

namespace ffpa::ptx {

inline void cp_async_16(uint32_t destination_smem, const void* source_gmem, int source_bytes = 16,
                        emu::CallSite site = emu::CallSite()) {
  emu::copy_async(destination_smem, source_gmem, 16, source_bytes, site);
}

inline void cp_async_16_or_zero(bool exists, uint32_t destination_smem, const void* source_gmem,
                                emu::CallSite site = emu::CallSite()) {
  emu::copy_async(destination_smem, source_gmem, 16, exists ? 16 : 0, site);
}

inline void cp_async_4(uint32_t destination_smem, const void* source_gmem, int source_bytes = 4,
                       emu::CallSite site = emu::CallSite()) {
  emu::copy_async(destination_smem, source_gmem, 4, source_bytes, site);
}

inline void cp_async_commit_group() { emu::commit_copies(); }

template <int kPending>
inline void cp_async_wait_group() {
  emu::wait_for_copies(kPending);
}

inline void cp_async_wait_all() { emu::wait_for_all_copies(); }

inline void cp_async_mbarrier_arrive(uint32_t barrier_smem, emu::CallSite site = emu::CallSite()) {
  emu::mbarrier_arrive_after_copies(barrier_smem, site);
}

}  // namespace ffpa::ptx
