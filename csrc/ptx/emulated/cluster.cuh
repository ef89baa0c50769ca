// Emulated side of ptx/native/cluster.cuh.
#pragma once

#include <cstdint>

#include "ptx/emulated/call_site.cuh"

namespace ffpa::ptx {

uint32_t cluster_rank();
void cluster_arrive(CallSite site = CallSite());
void cluster_wait(CallSite site = CallSite());
bool elect_one(CallSite site = CallSite());

// The source is read when the copy lands, which is as late as can be.
void copy_to_block(uint32_t destination_smem, uint32_t source_smem, uint32_t bytes, uint32_t barrier_smem,
                   uint32_t rank, CallSite site = CallSite());

}  // namespace ffpa::ptx
