// Writes a tile of shared memory to global memory, for kernels of tests.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "tile/smem_layout.cuh"

namespace ffpa::tile {

// The destination of a tile in global memory; what lies beyond `rows` and `columns` is not written.
struct GmemOutput {
  uint16_t* origin;
  int64_t row_stride;
  int rows;
  int columns;
};

// Writes kRows × kColumns elements from shared memory, 16 bytes a thread. `columns` must be a multiple of 8. The caller
// has synchronised the writers of the tile with all threads of the group.
template <int kRows, int kColumns, int kThreads, class Layout>
FFPA_DEVICE void store_tile(const GmemOutput& output, uint32_t tile_smem, const Layout& layout, int thread,
                            ptx::CallSite site = ptx::CallSite()) {
  constexpr int kChunksPerRow = kColumns / kChunkElements;
  static_assert(kColumns % kChunkElements == 0, "a tile is copied in chunks of 16 bytes");
  constexpr int kChunks = kRows * kChunksPerRow;
  FFPA_UNROLL
  for (int step = 0; step < ceil_div(kChunks, kThreads); ++step) {
    const int i = step * kThreads + thread;
    if (kChunks % kThreads != 0 && i >= kChunks) break;
    const int row = i / kChunksPerRow;
    const int chunk = i % kChunksPerRow;
    if (row >= output.rows || chunk * kChunkElements >= output.columns) continue;
    uint32_t value[4];
    ptx::ld_shared_16(value, tile_smem + layout.offset(row, chunk), site);
    ptx::st_global_16(output.origin + row * output.row_stride + chunk * kChunkElements, value, site);
  }
}

}  // namespace ffpa::tile
