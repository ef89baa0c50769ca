// RowLayout says how a tile of rows lies in shared memory, so that ldmatrix (8 rows, the same 16-byte chunk of each)
// and row-wise writes of 16 bytes a lane meet no bank conflicts.
//
// A layout maps (row, chunk) to a byte offset; a chunk is 16 bytes, 8 elements of 16 bits.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "base/math.h"

namespace ffpa::tile {

inline constexpr int kChunkBytes = 16;
inline constexpr int kChunkElements = 8;
inline constexpr uint32_t kSmemOfEveryGpu = 99 * 1024;  // bytes that a block can have on every GPU from sm_80 on
inline constexpr uint32_t kMostSmemBytes = 227 * 1024;  // bytes that a block can have where there is wgmma

// Rows lie in one of two ways:
//
//   swizzled   rows one behind the other, chunks permuted: chunk c of row r lies where chunk c ^ f(r) would. No space
//              is wasted. 128 bytes are one pass over the 32 banks. Where rows fill whole passes, f(r) = r % 8: 8
//              consecutive rows put a chunk into 8 different eighths of the banks. Rows that end amid a pass start in
//              2 (4) different places already, so f changes only every 2 (4) rows and has 4 (2) values. For rows of
//              32, 64 and 128 bytes this is the TMA swizzle of the same name.
//   padded     rows in order, each followed by unused bytes, so that it takes an odd number of chunks: 8 rows then
//              start in 8 different eighths of the banks, whatever the width.
class RowLayout {
 public:
  // `row_bytes` is a multiple of 16; for the swizzled way, it is 32 or a multiple of 64.
  FFPA_HOST_DEVICE constexpr explicit RowLayout(int row_bytes, bool padded = false)
      : pitch_(padded && row_bytes / kChunkBytes % 2 == 0 ? row_bytes + kChunkBytes : row_bytes),
        row_shift_(row_bytes % 128 == 0  ? 0
                   : row_bytes % 64 == 0 ? 1
                                         : 2),
        chunk_mask_(padded                 ? 0
                    : row_bytes % 128 == 0 ? 7
                    : row_bytes % 64 == 0  ? 3
                                           : 1) {}

  FFPA_HOST_DEVICE constexpr uint32_t offset(int row, int chunk) const {
    return uint32_t(row * pitch_ + ((chunk ^ ((row >> row_shift_) & chunk_mask_)) * kChunkBytes));
  }

  // Returns where (row + rows, chunk + chunks) lies, given the address of (row, chunk) in a tile that starts at a
  // multiple of 128 bytes: one exclusive or, and constants that become part of a load. `rows` is a multiple of 8;
  // `chunks` is even, and `chunk` is 0 or 1.
  FFPA_HOST_DEVICE constexpr uint32_t moved(uint32_t address, int rows, int chunks) const {
    return (address ^ uint32_t((chunks & chunk_mask_) * kChunkBytes)) +
           uint32_t((chunks & ~chunk_mask_) * kChunkBytes + rows * pitch_);
  }

  FFPA_HOST_DEVICE constexpr uint32_t bytes(int rows) const { return uint32_t(rows * pitch_); }

 private:
  int pitch_;
  int row_shift_;
  int chunk_mask_;
};

}  // namespace ffpa::tile
