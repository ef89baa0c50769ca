// Multiplies a row of dO with its row of O.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "ptx/instructions.cuh"

namespace ffpa {

inline constexpr int kLaneColumns = 8;  // columns that a lane reads at a time, 16 bytes

// Adds the products of eight columns of two rows to a sum, one after the other.
template <class Element>
FFPA_DEVICE void add_dot_of_8(float& sum, const uint16_t* a_gmem, const uint16_t* b_gmem) {
  uint32_t a[4], b[4];
  ptx::ld_global_16(a, a_gmem);
  ptx::ld_global_16(b, b_gmem);
  FFPA_UNROLL
  for (int j = 0; j < 4; ++j) {
    float a0, a1, b0, b1;
    ptx::unpack<Element>(a[j], a0, a1);
    ptx::unpack<Element>(b[j], b0, b1);
    sum += a0 * b0 + a1 * b1;
  }
}

// Returns dO·O of a row to each of the `lanes` lanes that share it. All lanes of a warp call this together, those that
// have no row with 0 columns. As many lanes share a row as its columns keep busy, or more: the bits are the same.
template <class Element>
FFPA_DEVICE float dot_of_rows(const uint16_t* out, const uint16_t* grad_out, int columns, int lane, int lanes) {
  float sum = 0;
  for (int column = lane * kLaneColumns; column < columns; column += lanes * kLaneColumns) {
    add_dot_of_8<Element>(sum, out + column, grad_out + column);
  }
  for (int distance = lanes / 2; distance > 0; distance /= 2) sum += ptx::shfl_xor(sum, distance);
  return sum;
}

}  // namespace ffpa
