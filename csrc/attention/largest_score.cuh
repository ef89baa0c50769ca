// Finds the largest score of each query head (AttentionParams::largest), for callers who clip Q and K by it.
//
// The softmax has the largest score of each row of a tile, and tells of it: warps raise the float of a head where
// theirs is larger than what they know to be told, which happens a few times a row tile at most. Whichever comes first,
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

// Returns the largest score that blocks have told of so far for the head of a row tile. Heads that share tiles have
// none in common.
template <class Kept>
FFPA_DEVICE float told_so_far(const AttentionParams& params, const Kept& kept) {
  if (params.tile_heads > 1) return -kInfinity;
  const SharedRowTile rows = kept.get();
  return float_from_bits(
      ptx::ld_acquire_global_4(params.largest + rows.batch() * int64_t{params.heads_q} + rows.head()));
}

// Tells AttentionParams::largest of the largest scores of two rows that each lane of a warp has; natural(x) is the
// score of what the softmax has as x, and rises with it. The rows are row_of(0) and row_of(1) of the row tile
// kept.get(). `told` is the largest x that the warp knows to be told, where all rows are of one head, and else -inf.
template <class Kept, class RowOf, class Natural>
FFPA_DEVICE void tell_largest(const float (&largest)[2], const AttentionParams& params, const Kept& kept, float& told,
                              const RowOf& row_of, const Natural& natural) {
  if (!ptx::vote_any(larger_of(largest[0], largest[1]) > told)) return;
  const bool has_one_head = params.tile_heads == 1;
  const SharedRowTile rows = kept.get();
  float* of_entry = params.largest + rows.batch() * int64_t{params.heads_q};
  float of_both = -kInfinity;
  FFPA_UNROLL
  for (int h = 0; h < 2; ++h) {
    const RowPlace at = rows.place(row_of(h));
    if (at.row > rows.last) continue;
    of_both = larger_of(of_both, largest[h]);
    if (!has_one_head && largest[h] > -kInfinity) raise_global(of_entry + at.head, natural(largest[h]));
  }
  if (!has_one_head) return;
  FFPA_UNROLL
  for (int distance = 16; distance > 0; distance /= 2) of_both = larger_of(of_both, ptx::shfl_xor(of_both, distance));
  if (!(of_both > told)) return;
  told = of_both;
  if (ptx::lane_id() == 0) raise_global(of_entry + rows.head(), natural(of_both));
}

}  // namespace ffpa
