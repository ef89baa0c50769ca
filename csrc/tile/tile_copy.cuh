// Copies between tiles of global and shared memory, by all threads of a group together.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
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

// Returns the window of `matrix` that begins at (row, column). Offsets are 64-bit: a tensor may exceed 2^31 elements.
FFPA_HOST_DEVICE constexpr GmemWindow window_at(const GmemWindow& matrix, int64_t row, int column) {
  // A window outside the matrix is empty, and its origin is never read; the pointer stays inside all the same.
  const bool empty = row >= matrix.rows || column >= matrix.columns;
  return {empty ? matrix.origin : matrix.origin + row * matrix.row_stride + column, matrix.row_stride,
          int(matrix.rows - row), matrix.columns - column};
}

// A team of kLanes threads copies neighbouring chunks of one row; the teams share the rows. Layouts repeat after 8 rows
// and 8 chunks (those of an odd number of 64 bytes, after 4): where a thread's steps are multiples of both, all its
// addresses lie at constant distances from its first ones.
template <int kColumns, int kThreads>
struct ChunkTeams {
  static_assert(kColumns % kChunkElements == 0, "a tile is copied in chunks of 16 bytes");
  static constexpr int kChunksPerRow = kColumns / kChunkElements;
  // The number of lanes in a team is a power of two that divides a row, and leaves 8 teams if it can. The hardware
  // writes for 8 lanes at a time, which then write to one row.
  static constexpr int kLanes = min_of(kChunksPerRow & -kChunksPerRow, clamp(kThreads / 8, 8, 32));
  static constexpr int kTeams = kThreads / kLanes;
  static constexpr int kPeriod = kChunksPerRow % 8 == 4 ? 4 : 8;
  static constexpr bool kConstantSteps = kTeams % 8 == 0 && (kLanes == kChunksPerRow || kLanes % kPeriod == 0);
};

// Starts the copy of those chunks of a tile for which `exists(row, chunk)` is true; the others become zeros.
template <int kRows, int kColumns, int kThreads, class Layout, class Exists>
FFPA_DEVICE void copy_chunks_async(uint32_t tile_smem, const Layout& layout, const GmemWindow& window, int thread,
                                   const Exists& exists, ptx::CallSite site) {
  using Teams = ChunkTeams<kColumns, kThreads>;
  constexpr int kChunksPerRow = Teams::kChunksPerRow, kTeam = Teams::kLanes, kTeams = Teams::kTeams;
  const int first_row = thread / kTeam;
  const int first_chunk = thread % kTeam;
  const uint32_t target = tile_smem + layout.offset(first_row, first_chunk);
  const uint16_t* source = window.origin + first_row * window.row_stride + first_chunk * kChunkElements;
  FFPA_UNROLL
  for (int row = 0; row < kRows; row += kTeams) {
    if (kRows % kTeams != 0 && first_row + row >= kRows) break;
    FFPA_UNROLL
    for (int chunk = 0; chunk < kChunksPerRow; chunk += kTeam) {
      const uint32_t to = Teams::kConstantSteps ? target + layout.offset(row, chunk)
                                                : tile_smem + layout.offset(first_row + row, first_chunk + chunk);
      ptx::cp_async_16_or_zero(exists(first_row + row, first_chunk + chunk), to, source + chunk * kChunkElements, site);
    }
    source += kTeams * window.row_stride;
  }
}

// Does the same with rows that lie anywhere: row_at(row) gives the address of a row. Teams take no chunks in turn, as a
// row has no more of them than a team has lanes.
template <int kRows, int kColumns, int kThreads, class Layout, class RowAt, class Exists>
FFPA_DEVICE void copy_rows_async(uint32_t tile_smem, const Layout& layout, const RowAt& row_at, int thread,
                                 const Exists& exists, ptx::CallSite site) {
  constexpr int kChunksPerRow = kColumns / kChunkElements, kTeams = kThreads / kChunksPerRow;
  static_assert(kRows % kTeams == 0 && kTeams % 8 == 0, "a thread's rows are whole periods of the layout apart");
  const int first_row = thread / kChunksPerRow, chunk = thread % kChunksPerRow;
  const uint32_t target = tile_smem + layout.offset(first_row, chunk);
  FFPA_UNROLL
  for (int row = 0; row < kRows; row += kTeams) {
    ptx::cp_async_16_or_zero(exists(first_row + row, chunk), target + layout.offset(row, 0),
                             row_at(first_row + row) + chunk * kChunkElements, site);
  }
}

// Starts the copy of kRows × kColumns elements into shared memory at `tile_smem`, by threads 0 … kThreads - 1 of a
// group. Rows and columns that the window does not have become zeros (a NaN that lay there would survive any mask:
// 0 · NaN = NaN). The caller commits, waits, and synchronises.
template <int kRows, int kColumns, int kThreads, class Layout>
FFPA_DEVICE void copy_tile_async(uint32_t tile_smem, const Layout& layout, const GmemWindow& window, int thread,
                                 ptx::CallSite site = ptx::CallSite()) {
  const auto exists = [&](int row, int chunk) { return row < window.rows && chunk * kChunkElements < window.columns; };
  copy_chunks_async<kRows, kColumns, kThreads>(tile_smem, layout, window, thread, exists, site);
}

// Does what copy_tile_async does, where most windows have the whole tile: then no chunk is tested. Other tiles are
// copied 16 rows at a time, in a loop, so that the rare case takes no registers from its surroundings.
template <int kRows, int kColumns, int kThreads, class Layout>
FFPA_DEVICE void copy_mostly_whole_tile_async(uint32_t tile_smem, const Layout& layout, const GmemWindow& window,
                                              int thread, ptx::CallSite site = ptx::CallSite()) {
  constexpr int kSlice = 16;
  static_assert(kRows % kSlice == 0, "tiles are whole slices");
  if (window.rows >= kRows && window.columns >= kColumns) {
    copy_chunks_async<kRows, kColumns, kThreads>(
        tile_smem, layout, window, thread, [](int, int) { return true; }, site);
    return;
  }
  FFPA_NO_UNROLL
  for (int row = 0; row < kRows; row += kSlice) {
    copy_tile_async<kSlice, kColumns, kThreads>(tile_smem + layout.bytes(row), layout, window_at(window, row, 0),
                                                thread, site);
  }
}

}  // namespace ffpa::tile
