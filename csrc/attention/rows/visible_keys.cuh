// Says which keys a block of rows sees: what causal, window and alignment come to, tile by tile and row by row. A Block
// is a KeptPlacedRowTile, or anything else that has rows and knows which keys they see.
#pragma once

#include "base/compiler.h"
#include "base/math.h"

namespace ffpa {

// The keys that some row of the block sees are [begin, end); there are none if begin >= end.
template <class Block>
FFPA_DEVICE int visible_keys_begin(const Block& block) {
  return max_of(block.first_row() + block.nearest(), 0);
}
template <class Block>
FFPA_DEVICE int visible_keys_end(const Block& block) {
  if (block.last_row() < block.first_row()) return 0;
  return min_of(block.last_row() + block.farthest() + 1, block.n_k());
}

// The tiles of `keys` keys that hold the visible keys: [first, end).
struct TileRange {
  int first, end;
};
template <class Block>
FFPA_DEVICE TileRange visible_tiles(const Block& block, int keys) {
  const int first = visible_keys_begin(block) / keys;
  return {first, max_of(ceil_div(visible_keys_end(block), keys), first)};
}

// Returns the block's part of these tiles, where they are cut into `splits` parts.
template <class Block>
FFPA_DEVICE TileRange visible_tiles(const Block& block, int keys, int splits) {
  const TileRange all = visible_tiles(block, keys);
  if (splits == 1) return all;
  const int tiles = ceil_div(all.end - all.first, splits);
  const int first_of_part = min_of(all.first + block.split() * tiles, all.end);
  return {first_of_part, min_of(first_of_part + tiles, all.end)};
}

// The keys that every row of the block sees are [begin, end); there are none if begin >= end.
template <class Block>
FFPA_DEVICE int common_keys_begin(const Block& block) {
  return block.last_row() + block.nearest();
}
template <class Block>
FFPA_DEVICE int common_keys_end(const Block& block) {
  return min_of(block.first_row() + block.farthest() + 1, block.n_k());
}

// Returns whether every row of the block sees each of `count` keys from `key` on.
template <class Block>
FFPA_DEVICE bool all_rows_see(const Block& block, int key, int count) {
  return key >= common_keys_begin(block) && key + count <= common_keys_end(block);
}

}  // namespace ffpa
