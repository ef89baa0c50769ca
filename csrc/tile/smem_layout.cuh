// How a tile of rows lies in shared memory, so that ldmatrix (8 rows, the same 16-byte chunk of each) and row-wise
// writes of 16 bytes a lane meet no bank conflicts.
//
// A layout maps (row, chunk) to a byte offset; a chunk is 16 bytes, 8 elements of 16 bits.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "base/math.h"

namespace ffpa::tile {

inline constexpr int kChunkBytes = 16;
inline constexpr int kChunkElements = 8;

// Rows one behind the other, chunks permuted: chunk c of row r lies where chunk c ^ f(r) would. No space is wasted.
//
// 128 bytes are one pass over the 32 banks. Rows of 128 bytes or more: f(r) = r % 8, so that 8 consecutive rows put a
// chunk into 8 different sixteenths of the banks. Rows of 64 and 32 bytes: 2 and 4 rows share a pass, so f changes only
// every 2 (4) rows and has 4 (2) values; rows of 192, 320, … bytes are as those of 64. For rows of 32, 64 and 128 bytes
// this is the TMA swizzle of the same name.
class SwizzledLayout {
 public:
  // Row bytes: 32, or a multiple of 64. May be known only at run time.
  FFPA_HOST_DEVICE constexpr explicit SwizzledLayout(int row_bytes)
      : row_bytes_(row_bytes),
        row_shift_(row_bytes % 128 == 0  ? 0
                   : row_bytes % 64 == 0 ? 1
                                         : 2),
        chunk_mask_(row_bytes % 128 == 0  ? 7
                    : row_bytes % 64 == 0 ? 3
                                          : 1) {}

  FFPA_HOST_DEVICE static constexpr bool supports(int row_bytes) {
    return row_bytes == 32 || (row_bytes > 0 && row_bytes % 64 == 0);
  }

  FFPA_HOST_DEVICE constexpr uint32_t offset(int row, int chunk) const {
    return uint32_t(row * row_bytes_ + ((chunk ^ ((row >> row_shift_) & chunk_mask_)) * kChunkBytes));
  }

  // Where (row + rows, chunk + chunks) lies, given the address of (row, chunk) in a tile that starts at a multiple of
  // 128 bytes: one exclusive or, and constants that become part of a load. Rows: a multiple of 8; chunks: even, with
  // chunk 0 or 1.
  FFPA_HOST_DEVICE constexpr uint32_t moved(uint32_t address, int rows, int chunks) const {
    return (address ^ uint32_t((chunks & chunk_mask_) * kChunkBytes)) +
           uint32_t((chunks & ~chunk_mask_) * kChunkBytes + rows * row_bytes_);
  }

  FFPA_HOST_DEVICE constexpr uint32_t bytes(int rows) const { return uint32_t(rows * row_bytes_); }

 private:
  int row_bytes_;
  int row_shift_;
  int chunk_mask_;
};

// Rows in order, each followed by unused bytes: for row widths that no swizzle fits. Rows of an even number of chunks
// get one chunk more: 8 rows then start in 8 different sixteenths of the banks, whatever the width.
class PaddedLayout {
 public:
  // Row bytes: a multiple of 16.
  FFPA_HOST_DEVICE constexpr explicit PaddedLayout(int row_bytes)
      : pitch_(row_bytes / kChunkBytes % 2 ? row_bytes : row_bytes + kChunkBytes) {}

  FFPA_HOST_DEVICE static constexpr bool supports(int row_bytes) { return row_bytes > 0 && row_bytes % 16 == 0; }

  FFPA_HOST_DEVICE constexpr uint32_t offset(int row, int chunk) const {
    return uint32_t(row * pitch_ + chunk * kChunkBytes);
  }

  FFPA_HOST_DEVICE constexpr uint32_t bytes(int rows) const { return uint32_t(rows * pitch_); }

 private:
  int pitch_;
};

}  // namespace ffpa::tile
