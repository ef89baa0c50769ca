// Writes a warp's accumulators, 16 rows as C fragments, to global memory: row by row, or in the order they are held.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "tile/fragments.cuh"

namespace ffpa::tile {

// Transposes four values of each of the four lanes of a row: lane t gets value t of each, in the order of lanes.
FFPA_DEVICE void exchange(uint32_t (&values)[4], int lane) {
  FFPA_UNROLL
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool is_upper = lane & distance;
    FFPA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      uint32_t &low = values[i], &high = values[i + distance];
      const uint32_t received = ptx::shfl_xor(is_upper ? low : high, distance);
      (is_upper ? low : high) = received;
    }
  }
}

// Rows that lie `row_stride` elements apart from `first_gmem` on; `count` of them exist.
struct StridedRows {
  void* first_gmem;
  int64_t row_stride;
  int count;

  FFPA_DEVICE bool has(int row) const { return row < count; }
  template <class Number>
  FFPA_DEVICE Number* at(int row) const {
    return static_cast<Number*>(first_gmem) + row * row_stride;
  }
};

// Writes 16 rows of a matrix of Element or of floats, fragment after fragment. `columns` counts what exists from the
// first column on; it is a multiple of 8.
template <class Element, int kFragments, class Rows = StridedRows>
class RowWriter {
 public:
  FFPA_DEVICE RowWriter(const Rows& rows, int columns, bool floats, int lane)
      : rows_(rows), columns_(columns), floats_(floats), lane_(lane) {}

  // Writes fragment `n`. All lanes call this, for n from 0 to kFragments - 1 in order.
  FFPA_DEVICE void put(int n, const float (&values)[4]) {
    put(n, values, [](int fragment) { return fragment * 8; });
  }

  // Does the same where column_of(n) is the first column of a fragment.
  template <class ColumnOf>
  FFPA_DEVICE void put(int n, const float (&values)[4], const ColumnOf& column_of) {
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      const Coordinate at = c_coordinate(lane_, 2 * h);
      if (floats_) {
        if (rows_.has(at.row) && column_of(n) < columns_) {
          float* row_gmem = rows_.template at<float>(at.row);
          ptx::st_global_8(row_gmem + column_of(n) + at.column,
                           {float_bits(values[2 * h]), float_bits(values[2 * h + 1])});
        }
        continue;
      }
      // Each of the four lanes of a row has 4 of a fragment's 16 bytes; each lane gets one fragment out of four.
      chunk_[h][n % 4] = ptx::pack<Element>(values[2 * h], values[2 * h + 1]);
      if (n % 4 < 3 && n < kFragments - 1) continue;
      exchange(chunk_[h], lane_);
      const int fragment = n / 4 * 4 + lane_ % 4;
      if (rows_.has(at.row) && fragment < kFragments && column_of(fragment) < columns_) {
        uint16_t* row_gmem = rows_.template at<uint16_t>(at.row);
        ptx::st_global_16(row_gmem + column_of(fragment), chunk_[h]);
      }
    }
  }

 private:
  Rows rows_;
  int columns_;
  bool floats_;
  int lane_;
  uint32_t chunk_[2][4];
};

// Saves a fragment to scratch memory that only the same warp reads, in the same order: 16 bytes a lane.
FFPA_DEVICE void save_fragment(float* warp_gmem, int n, const float (&values)[4], int lane) {
  ptx::st_global_16(warp_gmem + (n * 32 + lane) * 4,
                    {float_bits(values[0]), float_bits(values[1]), float_bits(values[2]), float_bits(values[3])});
}

FFPA_DEVICE void add_fragment(float (&values)[4], const float* warp_gmem, int n, int lane) {
  uint32_t bits[4];
  ptx::ld_global_16(bits, warp_gmem + (n * 32 + lane) * 4);
  FFPA_UNROLL
  for (int e = 0; e < 4; ++e) values[e] += float_from_bits(bits[e]);
}

// Adds the saved fragment times a factor, one for each half of the rows.
FFPA_DEVICE void add_fragment(float (&values)[4], const float* warp_gmem, int n, const float (&factor)[2], int lane) {
  uint32_t bits[4];
  ptx::ld_global_16(bits, warp_gmem + (n * 32 + lane) * 4);
  FFPA_UNROLL
  for (int e = 0; e < 4; ++e) values[e] += factor[e / 2] * float_from_bits(bits[e]);
}

}  // namespace ffpa::tile
