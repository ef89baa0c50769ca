// Copies between tiles of global and shared memory, by all threads of a group together.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "base/math.h"
#include "ptx/async_copy.cuh"
#include "ptx/call_site.cuh"
#include "ptx/memory.cuh"
#include "tile/smem_layout.cuh"

namespace ffpa::tile {

// A window into a matrix of 16-bit elements [rows][columns] in global memory. `origin` is the window's first element;
// `rows` and `columns` count what exists from there on (they may be negative or zero: nothing does), and everything
// beyond counts as zero. Rows are `row_stride` elements apart; columns are adjacent, and rows start 16-byte aligned.
struct GmemWindow {
  const uint16_t* origin;
  int64_t row_stride;
  int rows;
  int columns;
};

// The window of `matrix` whose first element is (row, column). Offsets are 64-bit: a tensor may exceed 2^31 elements.
FFPA_HOST_DEVICE constexpr GmemWindow window_at(const GmemWindow& matrix, int64_t row, int column) {
  // A window outside the matrix is empty, and then its origin is never read; keep the pointer inside.
  const bool empty = row >= matrix.rows || column >= matrix.columns;
  return {empty ? matrix.origin : matrix.origin + row * matrix.row_stride + column, matrix.row_stride,
          int(matrix.rows - row), matrix.columns - column};
}

// Starts the copy of kRows × kColumns elements into shared memory at `tile_smem`, by threads 0 … kThreads - 1 of a
// group. Rows and columns that the window does not have become zeros (a NaN that lay there would survive any mask:
// 0 · NaN = NaN). The caller commits, waits, and synchronises.
template <int kRows, int kColumns, int kThreads, class Layout>
FFPA_DEVICE void copy_tile_async(uint32_t tile_smem, const Layout& layout, const GmemWindow& window, int thread,
                                 ptx::CallSite site = ptx::CallSite()) {
  constexpr int kChunksPerRow = kColumns / kChunkElements;
  static_assert(kColumns % kChunkElements == 0, "a tile is copied in chunks of 16 bytes");
  constexpr int kChunks = kRows * kChunksPerRow;
  constexpr int kSteps = ceil_div(kChunks, kThreads);
  FFPA_NO_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    const int i = step * kThreads + thread;
    if (kChunks % kThreads != 0 && i >= kChunks) break;
    const int row = i / kChunksPerRow;
    const int chunk = i % kChunksPerRow;
    const int column = chunk * kChunkElements;
    const bool row_exists = row < window.rows;
    const int elements = row_exists ? clamp(window.columns - column, 0, kChunkElements) : 0;
    // A copy of 0 bytes reads nothing, but its address should still be one of the tensor's.
    const uint16_t* source = elements > 0 ? window.origin + row * window.row_stride + column : window.origin;
    ptx::cp_async_16(tile_smem + layout.offset(row, chunk), source, elements * int(sizeof(uint16_t)), site);
  }
}

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
