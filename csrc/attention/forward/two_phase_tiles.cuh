// The parts of the two-phase forward (forward/wgmma_two_phase.cuh on wgmma, forward/mma_two_phase.cuh on mma.sync)
// besides its products: a block's share of the scratch, the chunks of a row tile's keys, and where references
// (softmax.cuh) have moved. A moved reference never changes P̃ in memory, but O: in registers, between the tiles where
// a reference has moved; and in fp32 in the scratch, between chunks.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "attention/rows/row_tiles.cuh"
#include "attention/softmax.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "tile/fragment_output.cuh"

namespace ffpa {

// Divides AttentionParams::scratch among the blocks. A slice has room for chunk_keys keys, a multiple of kKeys.
template <int kRows, int kKeys, int kColumns>
class TwoPhaseScratch {
 public:
  FFPA_HOST_DEVICE explicit TwoPhaseScratch(const AttentionParams& params) : params_(params) {}

  // Returns the counter of row tiles that blocks have taken.
  FFPA_HOST_DEVICE uint32_t* taken() const { return reinterpret_cast<uint32_t*>(params_.scratch); }

  // Returns P̃ of all blocks: [blocks · kRows][chunk_keys].
  FFPA_HOST_DEVICE uint16_t* p() const { return reinterpret_cast<uint16_t*>(params_.scratch + kHeadFloats); }
  FFPA_HOST_DEVICE int64_t p_rows() const { return int64_t(params_.resident_blocks) * kRows; }

  // Returns the references of a block's rows, as each tile of the chunk has them: [chunk_keys / kKeys][kRows].
  FFPA_HOST_DEVICE float* references(int block) const {
    return params_.scratch + kHeadFloats + p_rows() * params_.chunk_keys / 2 +
           int64_t(block) * (params_.chunk_keys / kKeys * kRows);
  }

  // Returns the columns of O from `column` on that are computed together, at most kColumns, in the order of fragments;
  // they are needed where there are several chunks.
  FFPA_HOST_DEVICE float* out(int block, int column) const {
    const int64_t columns = ceil_div(params_.d_v, kColumns) * kColumns;
    return references(params_.resident_blocks) + (block * columns + column) * kRows;
  }

 private:
  static constexpr int kHeadFloats = 128;  // floats before P̃, which begins with a line of its own

  const AttentionParams& params_;
};

// A chunk of the keys that a row tile sees: tiles of S, and steps of the product with V. The first chunk may have none.
template <int kKeys, int kStep>
struct KeyChunk {
  int first_tile, end_tile;
  Run keys;
  bool is_first, is_last;

  FFPA_DEVICE int tiles() const { return end_tile - first_tile; }
  FFPA_DEVICE int first_key() const { return first_tile * kKeys; }  // key of column 0 of P̃
  FFPA_DEVICE int steps() const { return keys.steps(kStep); }

  // Returns the steps from tile `tile` up to tile `end`, both counted in the chunk.
  FFPA_DEVICE int steps(int tile, int end) const {
    const Run of_tiles = {max_of(keys.begin, (first_tile + tile) * kKeys),
                          min_of(keys.end, (first_tile + end) * kKeys)};
    return of_tiles.steps(kStep);
  }

  // Says whether O of the chunk is read by anybody: that of a part without keys is not.
  FFPA_DEVICE bool counts(const AttentionParams& params) const { return params.splits == 1 || tiles() > 0; }

  // Calls function(chunk) for all chunks of the keys that `rows` see, or of their part of these.
  template <class Function>
  static FFPA_DEVICE void for_each(const AttentionParams& params, const SharedRowTile& rows, const Function& function) {
    const Run keys = run_over_keys(rows, kStep);
    const TileRange tiles = keys.begin < keys.end ? visible_part(rows, kKeys, params) : TileRange{0, 0};
    const int most_tiles = params.chunk_keys / kKeys;
    int first = tiles.first;
    bool is_last;
    do {
      const int end = min_of(first + most_tiles, tiles.end);
      is_last = end == tiles.end;
      const Run of_chunk = {max_of(keys.begin, first * kKeys), min_of(keys.end, end * kKeys)};
      function(KeyChunk{first, end, of_chunk, first == tiles.first, is_last});
      first = end;
    } while (!is_last);
  }
};

// ---- moves of references ----

// Notes in which tiles of a chunk a reference has moved: a list in shared memory for each warp, or for warps that share
// their rows; a tile t is bit t % 32 of word t / 32.
class MovedTiles {
  static constexpr int kMostTiles = 2048;  // MOST_KEYS of two_phase.py is the same limit: a test compares them

 public:
  static constexpr uint32_t kBytes = kMostTiles / 32 * 4;

  FFPA_DEVICE explicit MovedTiles(uint32_t smem) : smem_(smem) {}

  // Notes one tile after the other, from 0; all lanes call it.
  FFPA_DEVICE void add(int tile, bool moved, int lane) {
    if (tile % 32 == 0) word_ = 0;
    word_ |= uint32_t(ptx::vote_ballot(moved) != 0) << tile % 32;
    if (lane == 0) ptx::st_shared_4(smem_ + tile / 32 * 4, word_);
  }

  // Returns the first tile from `tile` on that is in one of kWarps lists, the first of which lies at `smem`; or `end`.
  template <int kWarps>
  static FFPA_DEVICE int next(uint32_t smem, int tile, int end) {
    FFPA_NO_UNROLL
    while (tile < end) {
      uint32_t word = 0;
      FFPA_UNROLL
      for (int warp = 0; warp < kWarps; ++warp) word |= ptx::ld_shared_4(smem + warp * kBytes + tile / 32 * 4);
      const int end_of_word = (tile / 32 + 1) * 32;
      FFPA_NO_UNROLL
      for (word >>= tile % 32; word != 0; word >>= 1, ++tile) {
        if (word & 1) return tile;
      }
      tile = end_of_word;
    }
    return end;
  }

 private:
  uint32_t smem_, word_ = 0;
};

// ---- results ----

// Adds to a fragment of O what earlier chunks left of it in `partial`, times `factor`, and saves it there for a later
// chunk.
template <class Chunk>
FFPA_DEVICE void add_chunks(float (&values)[4], const Chunk& chunk, float* partial, int n, const float (&factor)[2],
                            int lane) {
  if (!chunk.is_first) tile::add_fragment(values, partial, n, factor, lane);
  if (!chunk.is_last) tile::save_fragment(partial, n, values, lane);
}

}  // namespace ffpa
