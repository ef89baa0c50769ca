// These are the numbers of a forward call, the same bytes for a GPU and for the emulator. They are declared here alone:
// Python reads this header (ffpa_attn/launching/structs.py) and fills them in (attention_call.py). Addresses are the
// only numbers that differ between the calls of a kind.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "base/math.h"

namespace ffpa {

// A tensor [batch, heads, rows, columns] of 16-bit elements; columns are adjacent, strides count elements. One of 8-bit
// elements counts as one of half as many columns.
struct TensorView {
  uint16_t* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
};

// A bool mask says which keys take part; the other kinds are added to scores.
enum class MaskKind : int { kNone, kBool, kHalf, kBFloat16, kFloat };

// A mask [batch, heads, rows, keys]; strides count bytes, and are 0 in dims where all share an element.
struct MaskView {
  const uint8_t* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
  int64_t key_stride;
  MaskKind kind;
};

// The places of a packed tensor's sequences: sequence i has the rows offsets[i] to offsets[i + 1]. Only the device
// reads them.
struct PackedRows {
  const int32_t* offsets;  // [batch + 1]; null: the tensor is not packed
  int total;               // rows of the tensor
};

// Returns the number of tiles of all packed sequences together (rows/packed_tiles.cuh).
FFPA_HOST_DEVICE int packed_tiles(const PackedRows& packed, int sequences, int rows) {
  return packed.total / rows + sequences;
}

// Keys that lie in the pages of a pool: its tensors are [pages, heads, rows of a page, columns]. Only the device reads
// what these addresses hold.
struct PagedKeys {
  const int32_t* used;   // [batch], keys of each sequence; null: keys lie in no pages
  const int32_t* table;  // [batch][entries], the pages of each sequence; null: sequence i has page i
  const int32_t* first;  // [batch], the row on which a sequence of one page begins; null: 0
  const int32_t* added;  // [batch + 1], offsets of rows that sequences have beside those that `used` counts; or null
  int64_t table_stride;  // entries from a sequence to the next
  int more;              // rows that each sequence has beside those
  int entries;           // the most pages of a sequence
  int rows;              // rows of a page: a multiple of 16, or any number where a sequence has one page
  int pages;             // pages of the pool

  // What 8-bit keys and values of a head are to be multiplied with, head · stride apart; null: 1.
  const float* k_scale;
  const float* v_scale;
  int k_scale_stride, v_scale_stride;
};

struct AttentionParams {
  // Packed sequences are batch entries whose n_q and n_k are their own; the tensors then have no batch dimension.
  TensorView q;    // [batch, heads_q, n_q, d_qk]
  TensorView k;    // [batch, heads_q / group, n_k, d_qk], or a pool of pages (PagedKeys), as v is
  TensorView v;    // [batch, heads_q / group, n_k, d_v]
  TensorView out;  // [batch, heads_q, n_q, d_v]
  float* lse;      // [batch, heads_q, n_q], natural log, or null
  int64_t lse_batch_stride;
  int64_t lse_head_stride;
  const float* sinks;  // [heads_q], logits in natural units that join the denominators of all rows; or null
  float* largest;      // [batch, heads_q], the largest scores in natural units, -inf before the call; or null
  PackedRows packed_q;
  PackedRows packed_k;
  PagedKeys paged;

  int batch;
  int heads_q;
  int group;  // query heads that share a key/value head
  int n_q;    // rows of each batch entry, or of the longest packed sequence
  int n_k;    // keys, likewise
  int d_qk;
  int d_v;

  // Row r sees the keys from `left` before to `right` after its diagonal; -1 is unbounded.
  int left;
  int right;
  bool top_left;  // the diagonal is key r, otherwise r + n_k - n_q

  // The factor of a raw score: scale / softcap, or, without a softcap, scale · log2(e), which gives the logit.
  float score_factor;
  float scale;    // turns a raw score into one in natural units
  float softcap;  // 0 means no softcap
  MaskView mask;  // [batch, heads_q, n_q, n_k]

  int stages;          // 1 … 4 slots in the ring of K and V steps
  int value_stages;    // slots in the ring of V steps, where they have a ring of their own
  bool q_resident;     // Q stays in shared memory; otherwise its columns come along with those of K
  bool grid_of_heads;  // a grid (items of a head, heads that share none, batch) instead of one dim; the items are the
                       // same

  // The scratch of kernels that stream O or P has a part for each block; the parts of P follow a counter of all blocks.
  float* scratch;
  int resident_blocks;  // blocks that the GPU runs at a time: the grid of such a kernel
  int tile_heads;       // query heads whose rows share row tiles; they divide a group
  int tile_rows;        // rows of each of these heads in a row tile
  int chunk_keys;       // keys of P that the scratch holds

  // Where few row tiles would leave the GPU idle, each part of the keys gets work items of its own. Their results are
  // merged afterwards, in the order of the keys: O [splits][batch · heads_q · n_q][part_columns], and behind it
  // (reference, sum of P) of each row [splits][batch · heads_q · n_q][2]. An LSE in place of these two would round the
  // weights.
  int splits;
  int part_keys;  // keys of a part, from the first tile of keys on that its row tile sees
  float* partial;

  FFPA_HOST_DEVICE bool has_rules() const { return softcap > 0 || mask.kind != MaskKind::kNone; }
  // Says whether scores may be so large that a float does not hold their logits, or be -inf by themselves.
  FFPA_HOST_DEVICE bool has_wide_mask() const {
    return mask.kind == MaskKind::kFloat || mask.kind == MaskKind::kBFloat16;
  }
  FFPA_HOST_DEVICE bool is_packed() const { return packed_q.offsets != nullptr; }
  FFPA_HOST_DEVICE bool is_paged() const { return paged.used != nullptr; }
  FFPA_HOST_DEVICE int64_t all_rows() const { return int64_t(batch) * heads_q * n_q; }
  FFPA_HOST_DEVICE int64_t row_of_all(int b, int head, int row) const {
    return (int64_t(b) * heads_q + head) * n_q + row;
  }
  FFPA_HOST_DEVICE int part_columns() const { return round_up(d_v, 64); }
  FFPA_HOST_DEVICE float* partial_out(int split) const { return partial + split * all_rows() * part_columns(); }
  FFPA_HOST_DEVICE float* partial_sums(int split) const {
    return partial + (splits * int64_t(part_columns()) + 2 * split) * all_rows();
  }
};

}  // namespace ffpa
