// Fragments of mma m16n8k16: which element of a matrix each value of each lane is, and which addresses ldmatrix needs
// to load them. All that a kernel knows about lanes and registers comes from here.
//
// With g = lane / 4 and t = lane % 4 (PTX manual, "Matrix Fragments for mma.m16n8k16 with floating point type"):
//
//   A [16 × 16], uint32_t a[4], value v = 2·r + h is half h of register r:
//       row g + 8·(r % 2),   k = 2t + 8·(r / 2) + h
//   B [16 × 8],  uint32_t b[2]:   k = 2t + 8·r + h,   column g
//   C [16 × 8],  float c[4]:      row g + 8·(v / 2),  column 2t + v % 2
//   C [16 × 8],  uint32_t c[2] of packed halves: the same with v = 2·r + h
//
// C's map is A's for one half of k: two neighbouring C fragments, packed, are one A fragment (P of attention):
//   a[0] = {c0[0], c0[1]}, a[1] = {c0[2], c0[3]}, a[2] = {c1[0], c1[1]}, a[3] = {c1[2], c1[3]}.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"

namespace ffpa::tile {

inline constexpr int kMmaN = 8;
inline constexpr int kMmaK = 16;

struct Coordinate {
  int row;
  int column;
};

// Returns (row, k) of value 0 … 7 of an A fragment.
FFPA_HOST_DEVICE constexpr Coordinate a_coordinate(int lane, int value) {
  const int r = value / 2;
  return {lane / 4 + 8 * (r % 2), 2 * (lane % 4) + 8 * (r / 2) + value % 2};
}

// Returns (k, column) of value 0 … 3 of a B fragment.
FFPA_HOST_DEVICE constexpr Coordinate b_coordinate(int lane, int value) {
  return {2 * (lane % 4) + 8 * (value / 2) + value % 2, lane / 4};
}

// Returns (row, column) of value 0 … 3 of a C fragment.
FFPA_HOST_DEVICE constexpr Coordinate c_coordinate(int lane, int value) {
  return {lane / 4 + 8 * (value / 2), 2 * (lane % 4) + value % 2};
}

// Calls function(m, h) for the rows that a lane has values of in kM C fragments, one below the other: fragment m has
// two, row 16m + 8h + lane / 4 each.
template <int kM, class Function>
FFPA_DEVICE void for_each_row(const Function& function) {
  FFPA_UNROLL
  for (int m = 0; m < kM; ++m) {
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) function(m, h);
  }
}

// These combine what the four lanes of a row have of it; each lane gets the result.
FFPA_DEVICE float sum_of_lanes(float value, ptx::CallSite site = ptx::CallSite()) {
  value += ptx::shfl_xor(value, 1, site);
  return value + ptx::shfl_xor(value, 2, site);
}
FFPA_DEVICE float largest_of_lanes(float value, ptx::CallSite site = ptx::CallSite()) {
  value = larger_of(value, ptx::shfl_xor(value, 1, site));
  return larger_of(value, ptx::shfl_xor(value, 2, site));
}

// The columns of C fragments side by side: value e of fragment n is in first_column(lane) + column_of(n) + e % 2.
struct AdjacentFragments {
  FFPA_HOST_DEVICE static constexpr int first_column(int lane) { return c_coordinate(lane, 0).column; }
  FFPA_HOST_DEVICE static constexpr int column_of(int n) { return n * kMmaN; }
};

// The columns of B, dealt out in pairs to four fragments, so that these together hold 8 adjacent columns for each lane:
// 16 bytes once they are packed, with nothing to exchange. Column c of B then lies where place_of(c) would.
struct DealtFragments {
  FFPA_HOST_DEVICE static constexpr int first_column(int lane) { return 8 * (lane % 4); }
  FFPA_HOST_DEVICE static constexpr int column_of(int n) { return n / 4 * 32 + n % 4 * 2; }
  FFPA_HOST_DEVICE static constexpr int place_of(int column) {
    return column / 32 * 32 + column % 8 / 2 * 8 + column % 32 / 8 * 2 + column % 2;
  }
};

// The functions below say where a lane points for ldmatrix: row and 8-element (16-byte) column chunk of the stored
// matrix, relative to the fragment's corner. Each matches the register order of the fragment it names.

// Loads one A fragment with ldmatrix_x4 from A stored [row][k].
FFPA_HOST_DEVICE constexpr Coordinate ldmatrix_a(int lane) { return {lane % 16, lane / 16}; }

// Loads one A fragment with ldmatrix_x4_trans from Aᵀ stored [k][row].
FFPA_HOST_DEVICE constexpr Coordinate ldmatrix_a_trans(int lane) { return {lane % 8 + 8 * (lane / 16), lane / 8 % 2}; }

// Loads two B fragments (16 columns of B) with ldmatrix_x4 from Bᵀ stored [column][k], such as K of attention:
// registers 0, 1 are b[0], b[1] of columns 0 … 7, registers 2, 3 those of columns 8 … 15.
FFPA_HOST_DEVICE constexpr Coordinate ldmatrix_b_pair(int lane) { return {lane % 8 + 8 * (lane / 16), lane / 8 % 2}; }

// Loads two B fragments (16 columns of B) with ldmatrix_x4_trans from B stored [k][column], such as V of attention; the
// registers are those of ldmatrix_b_pair.
FFPA_HOST_DEVICE constexpr Coordinate ldmatrix_b_pair_trans(int lane) { return {lane % 16, lane / 16}; }

// Packs two neighbouring C fragments (columns 0 … 7 and 8 … 15) into the A fragment of a following mma.
template <class Element>
FFPA_DEVICE void pack_c_pair_as_a(uint32_t (&a)[4], const float (&c0)[4], const float (&c1)[4]) {
  a[0] = ptx::pack<Element>(c0[0], c0[1]);
  a[1] = ptx::pack<Element>(c0[2], c0[3]);
  a[2] = ptx::pack<Element>(c1[0], c1[1]);
  a[3] = ptx::pack<Element>(c1[2], c1[3]);
}

}  // namespace ffpa::tile
