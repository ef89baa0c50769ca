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

// Gives dO·O of each of kRows rows to each of the `lanes` lanes that share them. All lanes of a warp call this
// together, those that have no row with 0 columns. As many lanes share a row as its columns keep busy, or more: the
// bits are the same. Several rows wait for memory together.
template <class Element, int kRows>
FFPA_DEVICE void dots_of_rows(float (&sums)[kRows], const uint16_t* const (&out)[kRows],
                              const uint16_t* const (&grad_out)[kRows], int columns, int lane, int lanes) {
  FFPA_UNROLL
  for (float& sum : sums) sum = 0;
  for (int column = lane * kLaneColumns; column < columns; column += lanes * kLaneColumns) {
    FFPA_UNROLL
    for (int i = 0; i < kRows; ++i) add_dot_of_8<Element>(sums[i], out[i] + column, grad_out[i] + column);
  }
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    FFPA_UNROLL
    for (float& sum : sums) sum += ptx::shfl_xor(sum, distance);
  }
}

// Returns dO·O of one row.
template <class Element>
FFPA_DEVICE float dot_of_rows(const uint16_t* out, const uint16_t* grad_out, int columns, int lane, int lanes) {
  float sums[1];
  const uint16_t* const outs[] = {out};
  const uint16_t* const grads[] = {grad_out};
  dots_of_rows<Element>(sums, outs, grads, columns, lane, lanes);
  return sums[0];
}

}  // namespace ffpa
