// Which keys a block of rows meets: what causal, window and alignment come to, tile by tile and row by row.
#pragma once

#include "attention/row_block.cuh"
#include "base/compiler.h"
#include "base/math.h"

namespace ffpa {

// Keys that some row of the block sees: [begin, end), empty if begin >= end.
FFPA_DEVICE int visible_keys_begin(const KeptRowBlock& block) { return max_of(block.first_row() + block.nearest(), 0); }
FFPA_DEVICE int visible_keys_end(const KeptRowBlock& block) {
  if (block.last_row() < block.first_row()) return 0;
  return min_of(block.last_row() + block.farthest() + 1, block.n_k());
}

// Whether every row of the block sees each of `count` keys from `key` on.
FFPA_DEVICE bool all_rows_see(const KeptRowBlock& block, int key, int count) {
  return key >= block.last_row() + block.nearest() && key + count - 1 <= block.first_row() + block.farthest() &&
         key + count <= block.n_k();
}

}  // namespace ffpa
