// Tiles of packed sequences, which begin anywhere. That nobody on the host knows how many each one needs does not
// matter: sequence i has those from offsets[i] / rows + i on, which are enough, and at most one too many.
#pragma once

#include "attention/attention_params.h"
#include "attention/visible_keys.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/memory.cuh"

namespace ffpa {

// Of all sequences.
FFPA_HOST_DEVICE int packed_tiles(const PackedRows& packed, int sequences, int rows) {
  return packed.total / rows + sequences;
}

FFPA_DEVICE int first_tile_of_sequence(const PackedRows& packed, int sequence, int rows) {
  if (sequence == 0) return 0;  // also where rows of no sequence come first
  return clamp(int(ptx::ld_global_4(packed.offsets + sequence)), 0, packed.total) / rows + sequence;
}

FFPA_DEVICE TileRange tiles_of_sequence(const PackedRows& packed, int sequences, int sequence, int rows) {
  const int first = first_tile_of_sequence(packed, sequence, rows);
  const int end = sequence + 1 < sequences ? first_tile_of_sequence(packed, sequence + 1, rows)
                                           : packed_tiles(packed, sequences, rows);
  return {first, max_of(end, first + 1)};
}

FFPA_DEVICE int sequence_of_tile(const PackedRows& packed, int sequences, int tile, int rows) {
  int first = 0, end = sequences;
  FFPA_NO_UNROLL
  while (end - first > 1) {
    const int middle = (first + end) / 2;
    if (first_tile_of_sequence(packed, middle, rows) <= tile) {
      first = middle;
    } else {
      end = middle;
    }
  }
  return first;
}

}  // namespace ffpa
