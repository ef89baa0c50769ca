// Tiles of packed sequences, which begin anywhere. That nobody on the host knows how many each one needs does not
// matter: sequence i has those from offsets[i] / rows + i on, which are enough, and at most one too many; besides those
// of rows that do not count: before the first sequence, behind the last one, and beyond the length that is allowed.
#pragma once

#include "attention/attention_params.h"
#include "attention/visible_keys.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/warp.cuh"

namespace ffpa {

// Of all sequences.
FFPA_HOST_DEVICE int packed_tiles(const PackedRows& packed, int sequences, int rows) {
  return packed.total / rows + sequences;
}

FFPA_DEVICE int first_tile_of_sequence(const PackedRows& packed, int sequence, int rows) {
  const int row = clamp(int(ptx::ld_global_4(packed.offsets + sequence)), 0, packed.total);
  return sequence == 0 ? 0 : row / rows + sequence;  // 0 also where rows of no sequence come first
}

FFPA_DEVICE TileRange tiles_of_sequence(const PackedRows& packed, int sequences, int sequence, int rows) {
  const int first = first_tile_of_sequence(packed, sequence, rows);
  const int end = sequence + 1 < sequences ? first_tile_of_sequence(packed, sequence + 1, rows)
                                           : packed_tiles(packed, sequences, rows);
  return {first, max_of(end, first + 1)};
}

// A tile of all sequences: whose it is, and which of its own.
struct PackedTile {
  int sequence, tile;
};

// By all lanes of a warp: each looks at another sequence, so that 32 take one look, 1024 two. A search that halves them
// would take as long as a tile of a short sequence. What it finds begins at the tile or before it, whatever the offsets
// say: sequence 0 does. No branch depends on what is read: the compiler would take what follows for divergent, which
// costs registers that kernels do not have.
FFPA_DEVICE PackedTile packed_tile(const PackedRows& packed, int sequences, int tile, int rows) {
  int sequence = 0, first_tile = 0, left = sequences;  // it is one of so many
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
