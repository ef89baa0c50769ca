// The place of a thread: its index, its block's index, the grid's extent, and where its dynamic shared memory starts.
#pragma once

#include <cstdint>

#include "base/compiler.h"

namespace ffpa::ptx {

// The compiler's own names for %tid, %ctaid and %nctaid let it reason about ranges, which asm would hide.
FFPA_DEVICE int thread_x() { return threadIdx.x; }
// Reads the thread index again. A persistent kernel would otherwise hold what it derives from its thread index in
// registers from beginning to end; what it derives from this value is computed anew and lives only while it is needed.
FFPA_DEVICE int thread_x_anew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
FFPA_DEVICE int block_x() { return blockIdx.x; }
FFPA_DEVICE int block_y() { return blockIdx.y; }
FFPA_DEVICE int block_z() { return blockIdx.z; }
FFPA_DEVICE int grid_x() { return gridDim.x; }
FFPA_DEVICE int grid_y() { return gridDim.y; }
FFPA_DEVICE int grid_z() { return gridDim.z; }

// Blocks are one-dimensional, so the lane follows from the thread index and needs no register read.
FFPA_DEVICE int lane_id() { return threadIdx.x % 32; }

// Returns the shared address of the block's dynamic shared memory, 1024-byte aligned (as the widest TMA swizzle needs).
FFPA_DEVICE uint32_t dynamic_smem() {
  extern __shared__ __align__(1024) uint8_t dynamic_smem_storage[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(dynamic_smem_storage));
}

}  // namespace ffpa::ptx
