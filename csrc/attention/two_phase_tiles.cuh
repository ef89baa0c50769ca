// What the two-phase forward (forward_two_phase.cuh on wgmma, forward_two_phase_mma.cuh on mma.sync) is besides its
// products: what a block has of the scratch, the order of row tiles, the chunks of their keys, the references of rows.
//
// m, the reference of a row, is an integer that follows its maximum only when that has grown by more than kLazyGrowth:
// what was computed with another one is mended by a power of two, which is exact. That is never P̃ in memory, but O: in
// registers, between the tiles where a reference has moved; and in fp32 in the scratch, between chunks.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/attention_params.h"
#include "attention/head_rows.cuh"
#include "attention/row_block.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/fragment_output.cuh"
#include "tile/kept_value.cuh"

namespace ffpa {

// What a block has of AttentionParams::scratch. A slice has room for chunk_keys keys, a multiple of kKeys.
template <int kRows, int kKeys, int kColumns>
class TwoPhaseScratch {
 public:
  FFPA_HOST_DEVICE explicit TwoPhaseScratch(const AttentionParams& params) : params_(params) {}

  // How many row tiles blocks have taken.
  FFPA_HOST_DEVICE uint32_t* taken() const { return reinterpret_cast<uint32_t*>(params_.scratch); }

  // Of all blocks: P̃ [blocks · kRows][chunk_keys].
  FFPA_HOST_DEVICE uint16_t* p() const { return reinterpret_cast<uint16_t*>(params_.scratch + kHeadFloats); }
  FFPA_HOST_DEVICE int64_t p_rows() const { return int64_t(params_.resident_blocks) * kRows; }

  // The references of the rows, as each tile of the chunk has them: [chunk_keys / kKeys][kRows].
  FFPA_HOST_DEVICE float* references(int block) const {
    return params_.scratch + kHeadFloats + p_rows() * params_.chunk_keys / 2 +
           int64_t(block) * (params_.chunk_keys / kKeys * kRows);
  }

  // The columns of O from `column` on that are computed together, at most kColumns, in the order of fragments; needed
  // where there are several chunks.
  FFPA_HOST_DEVICE float* out(int block, int column) const {
    const int64_t columns = ceil_div(params_.d_v, kColumns) * kColumns;
    return references(params_.resident_blocks) + (block * columns + column) * kRows;
  }

 private:
  static constexpr int kHeadFloats = 128;  // P̃ begins with a line of its own

  const AttentionParams& params_;
};

// Row tiles in the order in which blocks take them, whoever is free: head by head, so that blocks share K and V in the
// L2 cache; within heads whose K and V it holds together, the longest first under a causal mask.
class RowTiles {
 public:
  FFPA_HOST_DEVICE RowTiles(const AttentionParams& params, int rows)
      : heads_kv_(params.heads_q / params.group),
        group_(params.group),
        rows_(rows),
        tiles_(ceil_div(params.n_q, rows)),
        entries_(params.batch * heads_kv_) {
    const int64_t bytes = int64_t(params.n_k) * (int64_t(params.d_qk) + params.d_v) * 2;  // of K and V of an entry
    together_ = int(clamp(kCachedBytes / max_of(bytes, int64_t{1}), int64_t{1}, int64_t{max_of(entries_, 1)}));
  }

  // Of packed sequences as if all were the longest. That 32 bits are enough, also for what blocks take beyond the last
  // one, two_phase.plan makes sure.
  FFPA_HOST_DEVICE int count() const { return entries_ * group_ * tiles_; }

  FFPA_DEVICE HeadRows get(const AttentionParams& params, int item) const {
    const int items_of_section = together_ * group_ * tiles_, section = item / items_of_section;
    const int heads = min_of(together_, entries_ - section * together_) * group_;
    const int in_section = item % items_of_section;
    const int head = section * together_ * group_ + in_section % heads;  // of all query heads
    HeadRows rows;
    rows.batch_index = head / (heads_kv_ * group_);
    rows.head_index = head % (heads_kv_ * group_);
    rows.entry = batch_entry(params, rows.batch_index);
    rows.first = (tiles_ - 1 - in_section / heads) * rows_;
    rows.last = min_of(rows.first + rows_, rows.n_q()) - 1;
    return rows;
  }

 private:
  static constexpr int64_t kCachedBytes = 32 << 20;

  int heads_kv_, group_, rows_, tiles_, entries_, together_;
};

using KeptRows = tile::KeptValue<HeadRows>;

// function() for the row tiles that the block takes: `next` says which. The rows are kept, of which there are too many
// registers full.
template <class Next, class Function>
FFPA_DEVICE void for_each_row_tile(const AttentionParams& params, int rows_of_tile, const KeptRows& kept, int lane,
                                   const Next& next, const Function& function) {
  const RowTiles tiles(params, rows_of_tile);
  FFPA_NO_UNROLL
  for (int item = next(); item < tiles.count(); item = next()) {
    const HeadRows rows = tiles.get(params, item);
    if (rows.first > rows.last) continue;
    ptx::sync_warp();  // all lanes have done with those before
    kept.keep(rows, lane);
    function();
  }
}

// Some of the keys that a row tile sees: tiles of S, and steps of the product with V. The first chunk may have none.
template <int kKeys, int kStep>
struct KeyChunk {
  int first_tile, end_tile;
  Run keys;
  bool is_first, is_last;

  FFPA_DEVICE int tiles() const { return end_tile - first_tile; }
  FFPA_DEVICE int first_key() const { return first_tile * kKeys; }  // column 0 of P̃
  FFPA_DEVICE int steps() const { return keys.steps(kStep); }

  // From one of its tiles to another, counted in the chunk.
  FFPA_DEVICE int steps(int tile, int end) const {
    const Run of_tiles = {max_of(keys.begin, (first_tile + tile) * kKeys),
                          min_of(keys.end, (first_tile + end) * kKeys)};
    return of_tiles.steps(kStep);
  }

  // function(chunk) for all of them.
  template <class Function>
  static FFPA_DEVICE void for_each(const AttentionParams& params, const HeadRows& rows, const Function& function) {
    const Run keys = run_over_keys(rows, kStep), in_tiles = run_over_keys(rows, kKeys);
    const int first_of_all = in_tiles.begin / kKeys, end_of_all = first_of_all + in_tiles.steps(kKeys);
    const int most_tiles = params.chunk_keys / kKeys;
    int first = first_of_all;
    bool is_last;
    do {
      const int end = min_of(first + most_tiles, end_of_all);
      is_last = end == end_of_all;
      const Run of_chunk = {max_of(keys.begin, first * kKeys), min_of(keys.end, end * kKeys)};
      function(KeyChunk{first, end, of_chunk, first == first_of_all, is_last});
      first = end;
    } while (!is_last);
  }
};

// ---- references ----

FFPA_DEVICE float finite_reference(float reference) { return reference == -kInfinity ? 0.0f : reference; }

// What was computed with one reference, as a part of what is with a later one.
FFPA_DEVICE float growth(float then, float now) { return ptx::ex2(then - finite_reference(now)); }

// Of two rows that a thread answers for.
struct RowState {
  // P̃ stays below 2^8, far from what 16 bits hold: its precision is relative, and no row sum or product overflows.
  static constexpr float kLazyGrowth = 8.0f;

  float reference[2] = {-kInfinity, -kInfinity};  // -inf: the row has seen no key
  float sum[2] = {0, 0};                          // of the thread's keys, to the reference

  // The reference follows the maximum of a tile, and the sum the reference. Whether what there is of O has another one.
  FFPA_DEVICE bool follow(int h, float maximum) {
    const float before = reference[h];
    if (maximum - before > kLazyGrowth) reference[h] = std::ceil(maximum);
    sum[h] *= growth(before, reference[h]);
    return before != -kInfinity && reference[h] != before;
  }
};

// In which tiles of a chunk a reference has moved: a list for each warp in shared memory, bit t % 32 of word t / 32.
class MovedTiles {
  static constexpr int kMostTiles = 2048;  // as MOST_KEYS of two_phase.py has it: a test compares them

 public:
  static constexpr uint32_t kBytes = kMostTiles / 32 * 4;

  FFPA_DEVICE explicit MovedTiles(uint32_t smem) : smem_(smem) {}

  // One tile after the other, from 0; by all lanes.
  FFPA_DEVICE void add(int tile, bool moved, int lane) {
    if (tile % 32 == 0) word_ = 0;
    word_ |= uint32_t(ptx::vote_ballot(moved) != 0) << tile % 32;
    if (lane == 0) ptx::st_shared_4(smem_ + tile / 32 * 4, word_);
  }

  // The first from `tile` on that is in one of kWarps lists, the first of which lies at `smem`; or `end`.
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

// What O of row `r` of the head is multiplied with, `sum` being its whole sum. One thread writes its LSE.
FFPA_DEVICE float finish_row(const AttentionParams& params, const HeadRows& rows, int r, float reference, float sum,
                             bool writes) {
  if (params.lse != nullptr && writes && r <= rows.last) {
    float* lse =
        params.lse + rows.batch() * params.lse_batch_stride + rows.head() * params.lse_head_stride + rows.entry.q.begin;
    ptx::st_global_4(lse + r, float_bits((reference + ptx::lg2(sum)) * kLn2));  // no key: -inf + -inf
  }
  return sum > 0 ? 1 / sum : 0.0f;
}

// 16 rows of O, from row `row` of the tile and column `column` on: with what earlier chunks left in `partial`, times
// `factor`, for a later one; or as the result, times `inverse`. fragment(n, values) gives them.
template <class Element, int kFragments, class Chunk, class Fragment>
FFPA_DEVICE void finish_out(const AttentionParams& params, const HeadRows& rows, const Chunk& chunk, int row,
                            int column, float* partial, const float (&factor)[2], const float (&inverse)[2], int lane,
                            const Fragment& fragment) {
  const int first = rows.first + row, batch = params.is_packed() ? 0 : rows.batch();
  uint16_t* first_gmem = params.out.data + batch * params.out.batch_stride + rows.head() * params.out.head_stride +
                         (rows.entry.q.begin + int64_t(first)) * params.out.row_stride + column;
  tile::RowWriter<Element, kFragments> writer(first_gmem, params.out.row_stride, rows.last + 1 - first,
                                              params.d_v - column, false, lane);
  FFPA_UNROLL
  for (int n = 0; n < kFragments; ++n) {
    float values[4];
    fragment(n, values);
    if (!chunk.is_first) tile::add_fragment(values, partial, n, factor, lane);
    if (!chunk.is_last) {
      tile::save_fragment(partial, n, values, lane);
      continue;
    }
    FFPA_UNROLL
    for (int e = 0; e < 4; ++e) values[e] *= inverse[e / 2];
    writer.put(n, values);
  }
}

}  // namespace ffpa
