// Finds the largest score of each query head (AttentionParams::largest), for callers who clip Q and K by it.
//
// Warps raise the float of a head where a tile of theirs has a larger score than they have told before: that happens a
// few times a row tile. Whichever comes first, the result is the same. Scores are told before anything is made of them:
// it does not depend on references.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "tile/fragments.cuh"

namespace ffpa {

// Raises a float in global memory to `value`, which is not NaN.
FFPA_DEVICE void raise_global(float* address, float value) {
  const uint32_t bits = float_bits(value);
  if (bits >> 31) {
    ptx::red_min_global(address, bits);
  } else {
    ptx::red_max_signed_global(address, bits);
  }
}

// Tells AttentionParams::largest of the largest score that each lane of a warp has, where all rows are of one head;
// `told` is the largest that the warp has told of before.
FFPA_DEVICE void tell_largest_of_lanes(float largest, const AttentionParams& params, const SharedRowTile& rows,
                                       int lane, float& told) {
  FFPA_UNROLL
  for (int distance = 16; distance > 0; distance /= 2) largest = larger_of(largest, ptx::shfl_xor(largest, distance));
  if (!(largest > told)) return;
  told = largest;
  if (lane == 0) raise_global(params.largest + rows.batch() * int64_t{params.heads_q} + rows.head(), largest);
}

// Tells AttentionParams::largest of the scores of a warp's rows, those from `row` of the tile on; natural(x) is the
// score of what the fragments have, and rises with it. `told` is as tell_largest_of_lanes() has it.
template <int kM, int kN, class Natural>
FFPA_DEVICE void tell_largest(const float (&scores)[kM][kN][4], const AttentionParams& params,
                              const SharedRowTile& rows, int row, int lane, float& told, const Natural& natural) {
  float of_lane = -kInfinity;
  FFPA_UNROLL
  for (int m = 0; m < kM; ++m) {
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      const RowPlace at = rows.place(row + m * 16 + tile::c_coordinate(lane, 2 * h).row);
      float largest = -kInfinity;
      FFPA_UNROLL
      for (int n = 0; n < kN; ++n) {
        largest = larger_of(larger_of(largest, scores[m][n][2 * h]), scores[m][n][2 * h + 1]);
      }
      if (at.row > rows.last) largest = -kInfinity;
      if (rows.heads == 1) {
        of_lane = larger_of(of_lane, largest);
        continue;
      }
      largest = natural(tile::largest_of_lanes(largest));
      if (lane % 4 == 0 && largest > -kInfinity) {
        raise_global(params.largest + rows.batch() * int64_t{params.heads_q} + at.head, largest);
      }
    }
  }
  if (rows.heads == 1) tell_largest_of_lanes(natural(of_lane), params, rows, lane, told);
}

}  // namespace ffpa
