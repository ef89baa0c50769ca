// Tiles of packed sequences, which begin anywhere. The host does not know how many tiles a sequence needs, and need
// not: sequence i has those from offsets[i] / rows + i on, which are enough, and at most one too many. Besides, there
// are tiles of rows that do not count: before the first sequence, behind the last one, and beyond the allowed length.
#pragma once

#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"

namespace ffpa {

FFPA_DEVICE int first_tile_of_sequence(const PackedRows& packed, int sequence, int rows) {
  const int row = clamp(int(ptx::ld_global_4(packed.offsets + sequence)), 0, packed.total);
  return sequence == 0 ? 0 : row / rows + sequence;  // 0 also where the first rows belong to no sequence
}

FFPA_DEVICE TileRange tiles_of_sequence(const PackedRows& packed, int sequences, int sequence, int rows) {
  const int first = first_tile_of_sequence(packed, sequence, rows);
  const int end = sequence + 1 < sequences ? first_tile_of_sequence(packed, sequence + 1, rows)
                                           : packed_tiles(packed, sequences, rows);
  return {first, max_of(end, first + 1)};
}

// A tile of the packed sequences: the sequence it belongs to, and its index among the tiles of that sequence.
struct PackedTile {
  int sequence, tile;
};

// Finds the sequence of a tile. All lanes of a warp call it; each looks at another sequence, so that 32 take one look,
// 1024 two. A binary search would take as long as a tile of a short sequence. The sequence found begins at the tile or
// before it, whatever the offsets say: sequence 0 does. No branch depends on what is read: the compiler would take what
// follows for divergent, which costs registers that kernels do not have.
FFPA_DEVICE PackedTile packed_tile(const PackedRows& packed, int sequences, int tile, int rows) {
  int sequence = 0, first_tile = 0, left = sequences;  // sequences it may still be
  FFPA_NO_UNROLL
  while (left > 1) {
    left = ceil_div(left, 32);
    const int mine = sequence + ptx::lane_id() * left;
    const bool exists = mine < sequences;
    const int first_of_mine = first_tile_of_sequence(packed, exists ? mine : 0, rows);
    const int last_begun = ptx::bfind(ptx::vote_ballot(exists && first_of_mine <= tile));
    sequence += last_begun * left;
    first_tile = ptx::shfl_idx(first_of_mine, last_begun);
  }
  return {sequence, tile - first_tile};
}

}  // namespace ffpa
