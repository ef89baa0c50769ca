// Finds the largest score of each query head (AttentionParams::largest), for callers who clip Q and K by it.
//
// The softmax has the largest score of each row of a tile, keeps the largest of all tiles, and tells of it after the
// last one (in mma_rows, warps of 32 rows tell in each tile): a warp raises the float of a head. Whichever comes first,
// the result is the same; and it does not depend on references.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"

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

// Tells AttentionParams::largest that row `i` of the row tile, which a lane of a warp has, has this score as its
// largest. All lanes of the warp call it.
FFPA_DEVICE void tell_largest(float score, const AttentionParams& params, const SharedRowTile& rows, int i) {
  const RowPlace at = rows.place(i);
  if (at.row > rows.last) score = -kInfinity;
  if (params.tile_heads == 1) {
    FFPA_UNROLL
    for (int distance = 16; distance > 0; distance /= 2) score = larger_of(score, ptx::shfl_xor(score, distance));
    if (ptx::lane_id() > 0) return;
  }
  const int head = params.tile_heads == 1 ? rows.head() : at.head;
  if (score > -kInfinity) raise_global(params.largest + rows.batch() * int64_t{params.heads_q} + head, score);
}

}  // namespace ffpa
