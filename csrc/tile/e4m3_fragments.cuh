// B fragments of Half for mma m16n8k16, made of matrices that lie in shared memory as e4m3. ldmatrix moves units of 16
// bits, which are two elements here: so a lane gets its elements in another order than of a 16-bit matrix.
//
//   B along its rows (K)    of 16 adjacent elements of a row, lane t of four has 4t … 4t + 3. They are the elements 2t,
//                           2t + 1, 2t + 8, 2t + 9 of a product whose A is as prepare_row() leaves it
//   B across them (V)       lane g of eight has two adjacent columns, 2g and 2g + 1. Of two fragments, one gets the
//                           even columns of 16, one the odd ones; to_adjacent() puts results in order
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/compiler.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "tile/multiply.cuh"
#include "tile/smem_layout.cuh"

namespace ffpa::tile {

// Makes the fragments of two times 8 rows of B from what ldmatrix gives of each. The conversions are exact.
FFPA_DEVICE void b_pair_of_e4m3(uint32_t (&fragments)[4], uint32_t first, uint32_t second) {
  FFPA_UNROLL
  for (int rows = 0; rows < 2; ++rows) {
    uint32_t halves[2];
    ptx::halves_of_e4m3(halves, rows == 0 ? first : second);
    fragments[2 * rows] = halves[0];
    fragments[2 * rows + 1] = halves[1];
  }
}

// Makes the fragments of the even and of the odd columns from what a transposing ldmatrix gives of two times 8 rows:
// each has two columns of one row, then of the next.
FFPA_DEVICE void b_pair_of_e4m3_trans(uint32_t (&fragments)[4], uint32_t first, uint32_t second) {
  FFPA_UNROLL
  for (int rows = 0; rows < 2; ++rows) {
    uint32_t of_column[2];
    ptx::halves_of_e4m3(of_column, ptx::permute_bytes<0x3120>(rows == 0 ? first : second));
    fragments[rows] = of_column[0];
    fragments[2 + rows] = of_column[1];
  }
}

// Returns the biased exponent of the largest of a row's elements, that of BFloat16; all lanes of the warp call this.
// The row is 16 · `pairs` elements, two chunks for each of `pairs`, where chunks_of(pair, addresses) says.
template <class ChunksOf>
FFPA_DEVICE uint32_t largest_exponent(int pairs, const ChunksOf& chunks_of, int lane) {
  uint32_t largest = 0;
  FFPA_NO_UNROLL
  for (int pair = lane; pair < pairs; pair += 32) {
    uint32_t addresses[2];
    chunks_of(pair, addresses);
    FFPA_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t chunk[4];
      ptx::ld_shared_16(chunk, addresses[i]);
      FFPA_UNROLL
      for (uint32_t word : chunk) largest = max_of(largest, max_of(word & 0x7fff, word >> 16 & 0x7fff));
    }
  }
  FFPA_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) largest = max_of(largest, ptx::shfl_xor(largest, distance));
  return largest >> 7;
}

// Makes a row of A in shared memory what b_pair_of_e4m3() asks for: Half, each 16 elements in its order. A row of
// BFloat16, whose exponents are more than those of Half, is multiplied with the power of two that makes its largest
// element one of the largest of Half; what is 2^-29 of that, or more, keeps all of its bits. Returns the power's
// inverse.
template <class Element, class ChunksOf>
FFPA_DEVICE float prepare_row(int pairs, const ChunksOf& chunks_of, int lane) {
  float factor = 1, inverse = 1;
  if constexpr (!std::is_same_v<Element, Half>) {
    const uint32_t exponent = max_of(largest_exponent(pairs, chunks_of, lane), 16u);  // both are normal numbers
    factor = float_from_bits((269 - exponent) << 23);
    inverse = float_from_bits((exponent - 15) << 23);
  }
  FFPA_NO_UNROLL
  for (int pair = lane; pair < pairs; pair += 32) {
    uint32_t addresses[2], chunks[2][4];
    chunks_of(pair, addresses);
    FFPA_UNROLL
    for (int i = 0; i < 2; ++i) {
      ptx::ld_shared_16(chunks[i], addresses[i]);
      FFPA_UNROLL
      for (int word = 0; word < 4 && !std::is_same_v<Element, Half>; ++word) {
        float low, high;
        ptx::unpack<Element>(chunks[i][word], low, high);
        chunks[i][word] = ptx::pack<Half>(low * factor, high * factor);
      }
    }
    FFPA_UNROLL
    for (int i = 0; i < 2; ++i) {
      ptx::st_shared_16(addresses[i], {chunks[0][i], chunks[0][i + 2], chunks[1][i], chunks[1][i + 2]});
    }
  }
  return inverse;
}

// Does so with the first `rows` rows of a block's A, by all its warps; the others are zeros. Leaves at factors_smem
// what sums of each row are then to be multiplied with; `factor` is that of B. chunks_of(row, pair, addresses) says
// where a row lies. The caller synchronises.
template <class Element, int kRows, int kWarps, class ChunksOf>
FFPA_DEVICE void prepare_rows(int rows, int pairs, const ChunksOf& chunks_of, float factor, uint32_t factors_smem,
                              int thread) {
  const int lane = thread % 32;
  FFPA_NO_UNROLL
  for (int row = thread / 32; row < kRows; row += kWarps) {
    const auto of_row = [&](int pair, uint32_t (&addresses)[2]) { chunks_of(row, pair, addresses); };
    const float inverse = row < rows ? prepare_row<Element>(pairs, of_row, lane) : 0;
    const float finite = min_of(inverse * factor, 3.4e38f);  // a product of zeros stays 0
    if (lane == 0) ptx::st_shared_4(factors_smem + row * sizeof(float), float_bits(finite));
  }
}

// Computes sums += A · B as add_product() does, with B in e4m3. a(fragment, m, depth) brings A; bytes(raw, depths,
// pair) loads what two depths, 2 · depths and the next one, have of a pair, in the order of depths if kAcross (for
// b_pair_of_e4m3_trans), else of rows. All bytes are on their way before the first are converted.
template <bool kAcross, int kDepths, int kM, int kN, class LoadA, class LoadBytes>
FFPA_DEVICE void add_product_of_e4m3(Accumulator<float> (&sums)[kM][kN], const LoadA& a, const LoadBytes& bytes) {
  static_assert(kDepths % 2 == 0 && kN % 2 == 0, "bytes come for two depths and a pair of fragments");
  constexpr int kPairs = kN / 2;
  uint32_t raw[kDepths / 2][kPairs][4], a_rmem[2][kM][4];
  FFPA_UNROLL
  for (int depths = 0; depths < kDepths / 2; ++depths) {
    FFPA_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) bytes(raw[depths][pair], depths, pair);
  }
  FFPA_UNROLL
  for (int m = 0; m < kM; ++m) a(a_rmem[0][m], m, 0);
  FFPA_UNROLL
  for (int depth = 0; depth < kDepths; ++depth) {
    FFPA_UNROLL
    for (int m = 0; m < kM && depth + 1 < kDepths; ++m) a(a_rmem[(depth + 1) % 2][m], m, depth + 1);
    FFPA_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      const uint32_t (&of_depths)[4] = raw[depth / 2][pair];
      uint32_t b[4];
      if constexpr (kAcross) {
        b_pair_of_e4m3_trans(b, of_depths[depth % 2 * 2], of_depths[depth % 2 * 2 + 1]);
      } else {
        b_pair_of_e4m3(b, of_depths[depth % 2], of_depths[2 + depth % 2]);
      }
      FFPA_UNROLL
      for (int m = 0; m < kM; ++m) {
        sums[m][2 * pair].template multiply_add<Half>(a_rmem[depth % 2][m], b[0], b[1]);
        sums[m][2 * pair + 1].template multiply_add<Half>(a_rmem[depth % 2][m], b[2], b[3]);
      }
    }
  }
}

// Turns C fragments of the even and of the odd columns of 16 into those of the first 8 and of the last 8.
FFPA_DEVICE void to_adjacent(float (&even)[4], float (&odd)[4], int lane) {
  const int quad = lane & ~3, t = lane % 4;
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) {
    float of_half[2][2];  // columns 2t and 2t + 1 of either half
    FFPA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int from = quad + 2 * half + t / 2;  // that lane has columns 4 (t / 2) … of the half
      FFPA_UNROLL
      for (int column = 0; column < 2; ++column) {
        const float (&held)[4] = column == 0 ? even : odd;
        const float low = ptx::shfl_idx(held[2 * h], from), high = ptx::shfl_idx(held[2 * h + 1], from);
        of_half[half][column] = t % 2 == 0 ? low : high;
      }
    }
    FFPA_UNROLL
    for (int column = 0; column < 2; ++column) {
      even[2 * h + column] = of_half[0][column];
      odd[2 * h + column] = of_half[1][column];
    }
  }
}

}  // namespace ffpa::tile
