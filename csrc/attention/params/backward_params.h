// The parameters of the backward's kernels: of backward_mma_short, which takes no workspace and no chunks, and of those
// that share one workspace and take the problem chunk after chunk:
//
//   backward_rows       for every row of dO and O: LSE in base 2, δ = dO·O - dLSE, a RowShare
//   backward_*_scores   for every (row, key) tile that has visible pairs: P and dS, into the workspace
//   backward_*_products dV = Pᵀ dO, dK = dSᵀ Q, dQ = dS K
//
// An entry is a key/value head of a batch entry, together with the `group` query heads that share it; their rows are
// counted head after head, in tiles of kRowTile. A chunk is all rows of several entries; or, of one entry, some heads
// or some row tiles of a head, with all keys or some key tiles. Gradients are then sums over several chunks, which
// `partial` keeps in fp32. Chunks of the same rows come in the order of keys, those of the same keys in that of rows;
// where no row sees a key, there need not be any. Gradients of rows without keys, and of keys that no row sees, are
// zero before the first product.
//
// For packed sequences, an entry is a key/value head of all of them. Its key tiles are those of one sequence after the
// other (rows/packed_tiles.cuh); so are its row tiles, where each sequence has those of all heads. A row of the
// workspace has keys of its own sequence, and under a window only those that its band has (backward/tiles.cuh).
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/params/attention_params.h"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"

namespace ffpa {

inline constexpr int kRowTile = 256;    // rows are counted in tiles of this size, the most that a tile of a product has
inline constexpr int kKeyTile = 256;    // keys are counted in tiles of this size; a tile of P has as many
inline constexpr int kScoreRows = 128;  // rows of a tile of P
inline constexpr int kLiveRows = 64;    // rows in a word of live_rows
inline constexpr int kRowStatistics = 4;

// The workspace holds 2^kExponentOfP times P. In halves, P of long rows loses digits: below 2^-14 they have fewer.
template <class Element>
inline constexpr int kExponentOfP = std::is_same_v<Element, Half> ? 12 : 0;
template <class Element>
inline constexpr float kUnitOfP = 1.0f / (1 << kExponentOfP<Element>);

// A gradient [batch, heads, rows, columns], 16-bit elements or floats; columns are adjacent, strides count elements.
struct GradientView {
  void* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
};

struct BackwardParams {
  AttentionParams attention;  // lse and out are over all keys that the rows saw, here or elsewhere
  TensorView grad_out;        // [batch, heads_q, n_q, d_v]
  const float* grad_lse;      // shape of lse, or null
  const float* delta;         // shape of lse, or null: δ, which backward_rows computes otherwise
  GradientView dq, dk, dv;    // shapes of q, k, v
  bool float_gradients;

  float* statistics;    // [shape of lse][kRowStatistics]: LSE · log2(e), +inf where that is infinite; δ; RowShare
  uint64_t* live_rows;  // [all heads][live_words]: bit r of a word is 0 where row r must not count; then two counters

  int first_entry, entries;  // entries of the chunk
  int first_tile, end_tile;  // row tiles of each entry
  int first_key, end_key;    // keys of the chunk, multiples of kKeyTile
  int turn;                  // half of `partial` that the chunk goes on from, where its sums take turns
  int gives_q;               // whether dQ of the chunk, or a part of its sums, is computed before dK and dV
  int most_columns;          // the most of a row of P or dS, in whole key tiles: for all keys, or for a band
  uint16_t* p;               // P · 2^kExponentOfP [entries · row tiles · kRowTile][workspace_columns]
  uint16_t* ds;
  float* partial;  // sums, in the order of fragments: of dQ of the chunk's rows; or of dK and dV of its keys; or, for
                   // packed sequences, of the longest one's keys twice: the first sequence in a chunk may go on from an
                   // earlier chunk, the last in a later one

  FFPA_HOST_DEVICE int heads_kv() const { return attention.heads_q / attention.group; }
  FFPA_HOST_DEVICE int all_heads() const { return attention.heads_q * (attention.is_packed() ? 1 : attention.batch); }
  FFPA_HOST_DEVICE int tiles_of_head() const { return tiles_of(attention.packed_q, attention.n_q, kRowTile); }
  FFPA_HOST_DEVICE int tiles_of_entry() const { return tiles_of_head() * attention.group; }
  FFPA_HOST_DEVICE int tiles_of_chunk() const { return end_tile - first_tile; }  // row tiles of each of its entries
  FFPA_HOST_DEVICE int heads_of_chunk() const { return max_of(tiles_of_chunk() / tiles_of_head(), 1); }
  FFPA_HOST_DEVICE int keys_of_entry() const {
    return tiles_of(attention.packed_k, attention.n_k, kKeyTile) * kKeyTile;
  }
  FFPA_HOST_DEVICE int keys_of_chunk() const { return end_key - first_key; }
  FFPA_HOST_DEVICE int64_t workspace_rows() const { return int64_t(entries) * tiles_of_chunk() * kRowTile; }
  FFPA_HOST_DEVICE int keys_of_longest() const { return ceil_div(attention.n_k, kKeyTile) * kKeyTile; }
  FFPA_HOST_DEVICE int workspace_columns() const { return min_of(keys_of_chunk(), most_columns); }
  // Says whether a row of the workspace has columns only for what its score tile's rows may see.
  FFPA_HOST_DEVICE bool has_bands() const { return workspace_columns() < min_of(keys_of_chunk(), keys_of_longest()); }
  FFPA_HOST_DEVICE bool sums_take_turns() const { return keys_of_chunk() > 2 * keys_of_longest(); }
  FFPA_HOST_DEVICE int live_words() const {
    return tiles_of(attention.packed_q, attention.n_q, kLiveRows);
  }  // words of a head
  // Returns the counter of the tiles that have been taken of dQ, or of dK and dV, where blocks take what comes next.
  FFPA_HOST_DEVICE uint32_t* taken(bool of_q) const {
    return reinterpret_cast<uint32_t*>(live_rows + int64_t(all_heads()) * live_words()) + (of_q ? 0 : 1);
  }

 private:
  FFPA_HOST_DEVICE int tiles_of(const PackedRows& packed, int n, int rows) const {
    return attention.is_packed() ? packed_tiles(packed, attention.batch, rows) : ceil_div(n, rows);
  }
};

}  // namespace ffpa
