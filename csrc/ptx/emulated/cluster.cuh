// Emulated side of ptx/native/cluster.cuh.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/machine.h"
#include "ptx/emulated/machine/mbarrier.h"
#include "ptx/emulated/machine/tma.h"

namespace ffpa::ptx {

inline uint32_t cluster_rank() { return uint32_t(emu::current->block->rank); }
inline void cluster_arrive(emu::CallSite site = emu::CallSite()) { emu::cluster_arrive(site); }
inline void cluster_wait(emu::CallSite site = emu::CallSite()) { emu::cluster_wait(site); }
inline void copy_to_block(uint32_t destination_smem, uint32_t source_smem, uint32_t bytes, uint32_t barrier_smem,
                          uint32_t rank, emu::CallSite site = emu::CallSite()) {
  emu::copy_to_block(destination_smem, source_smem, bytes, barrier_smem, rank, site);
}
inline bool elect_one(emu::CallSite site = emu::CallSite()) { return emu::elect_one(site); }

}  // namespace ffpa::ptx
