// Entries of the batch, tiles of their rows, and which keys these see: what causal, window and alignment come to.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "tile/tile_copy.cuh"

namespace ffpa {

// ---- one entry of the batch: where its rows and keys lie, and which of them meet ----
//
// Packed sequences are entries whose place and length are read here, on the device.

// The rows [begin, end) of a packed tensor.
struct RowRange {
  int begin, end;
};

// Returns the rows of a sequence: within the tensor and no more than `longest`, whatever the offsets say.
FFPA_DEVICE RowRange rows_of_sequence(const PackedRows& packed, int sequence, int longest) {
  const int begin = clamp(int(ptx::ld_global_4(packed.offsets + sequence)), 0, packed.total);
  const int end = clamp(int(ptx::ld_global_4(packed.offsets + sequence + 1)), 0, packed.total);
  return {begin, begin + clamp(end - begin, 0, longest)};
}

// Returns the rows of a sequence's keys in pages: from the first one on, if it has one page, else from the first page's
// first row on. No sequence has more than pages and `longest` hold, whatever the lengths say.
FFPA_DEVICE RowRange keys_in_pages(const PagedKeys& paged, int sequence, int longest) {
  int64_t count = int64_t(int(ptx::ld_global_4(paged.used + sequence))) + paged.more;
  if (paged.added != nullptr) {
    count += int(ptx::ld_global_4(paged.added + sequence + 1)) - int64_t(int(ptx::ld_global_4(paged.added + sequence)));
  }
  int begin = 0;
  if (paged.first != nullptr) {
    begin = clamp(int(ptx::ld_global_4(paged.first + sequence)), 0, paged.rows);
    longest = min_of(longest, paged.rows - begin);
  }
  return {begin, begin + int(clamp(count - begin, int64_t{0}, int64_t{longest}))};
}

struct BatchEntry {
  RowRange q, k;          // k counts rows from the first page's first row on, where keys lie in pages
  int nearest, farthest;  // row r sees the keys from r + nearest to r + farthest that exist

  FFPA_DEVICE int n_q() const { return q.end - q.begin; }
  FFPA_DEVICE int n_k() const { return k.end - k.begin; }
};

template <bool kPaged = false>
FFPA_DEVICE BatchEntry batch_entry(const AttentionParams& params, int batch) {
  BatchEntry entry = {{0, params.n_q}, {0, params.n_k}, 0, 0};
  if (params.is_packed()) {
    entry.q = rows_of_sequence(params.packed_q, batch, params.n_q);
    if constexpr (!kPaged) entry.k = rows_of_sequence(params.packed_k, batch, params.n_k);
  }
  if constexpr (kPaged) entry.k = keys_in_pages(params.paged, batch, params.n_k);
  // A window that reaches every key from every row is cut back to that: sums stay below n_q + n_k and a tile.
  const int64_t diagonal = params.top_left ? 0 : entry.n_k() - entry.n_q();
  const int64_t all_before = -entry.n_q(), all_after = entry.n_k();
  entry.nearest = int(params.left < 0 ? all_before : max_of(diagonal - params.left, all_before));
  entry.farthest = int(params.right < 0 ? all_after : min_of(diagonal + params.right, all_after));
  return entry;
}

// ---- which keys a block of rows sees, tile by tile ----
//
// A Block is a RowTile, or anything else that has rows and knows which keys they see.

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

  FFPA_DEVICE bool is_empty() const { return first == end; }
};
template <class Block>
FFPA_DEVICE TileRange visible_tiles(const Block& block, int keys) {
  const int first = visible_keys_begin(block) / keys;
  return {first, max_of(ceil_div(visible_keys_end(block), keys), first)};
}

// Returns the block's part of these tiles. Its length is the same for all sequences of a call, and it is cut from what
// the block sees: so no result depends on other sequences.
template <class Block>
FFPA_DEVICE TileRange visible_part(const Block& block, int keys, const AttentionParams& params) {
  const TileRange all = visible_tiles(block, keys);
  if (params.splits == 1) return all;
  const int tiles = params.part_keys / keys;
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

// ---- rows as blocks take them ----

// A range of rows of one query head.
struct RowTile {
  BatchEntry entry;
  int batch_index, head_index;
  int first, last;  // existing rows; none where last < first

  FFPA_DEVICE int batch() const { return batch_index; }
  FFPA_DEVICE int head() const { return head_index; }
  FFPA_DEVICE int n_q() const { return entry.n_q(); }
  FFPA_DEVICE int n_k() const { return entry.n_k(); }
  FFPA_DEVICE int nearest() const { return entry.nearest; }
  FFPA_DEVICE int farthest() const { return entry.farthest; }
  FFPA_DEVICE int first_row() const { return first; }
  FFPA_DEVICE int last_row() const { return last; }
  FFPA_DEVICE int q_begin() const { return entry.q.begin; }
};

// A row's query head and its number in the batch entry.
struct RowPlace {
  int head, row;
};

// The rows of a tile of a forward: those of one query head, or the same ones of `heads` adjacent query heads that share
// a key/value head. Row i of the tile is row first + i / heads of query head head() + i % heads.
struct SharedRowTile : RowTile {
  int inverse;  // inverse_of(heads)
  uint16_t heads;
  uint16_t part;  // index of the part of the keys that counts, where they are split

  // Returns what makes the divisions of a tile's rows by `heads` products; both are below 2^8.
  static FFPA_HOST_DEVICE int inverse_of(int heads) { return ceil_div(1 << 16, heads); }

  FFPA_DEVICE int split() const { return part; }
  FFPA_DEVICE int count() const { return (last - first + 1) * heads; }
  FFPA_DEVICE const SharedRowTile& get() const { return *this; }  // as KeptRows has it
  FFPA_DEVICE RowPlace place(int i) const {
    const int row = i * inverse >> 16;
    return {head_index + i - row * heads, first + row};
  }
};

// Returns whether row `i` of the tile exists, or one behind it does.
FFPA_DEVICE bool has_row(const SharedRowTile& rows, int i) { return rows.place(i).row <= rows.last; }

// Returns the place of a row as those count rows who compute scores: SharedRowTile from its first row on, others from
// the first row of the batch entry.
template <class Block>
FFPA_DEVICE RowPlace place_in(const Block& block, int row) {
  return {block.head(), row};
}
FFPA_DEVICE RowPlace place_in(const SharedRowTile& rows, int row) { return rows.place(row); }

// The positions [begin, end) of keys or rows that a product runs over, in steps.
struct Run {
  int begin, end;

  FFPA_DEVICE int steps(int step) const { return ceil_div(end - begin, step); }
  FFPA_DEVICE bool is_empty() const { return begin == end; }
};

// Returns [begin, end) with its begin moved down to a whole step; an empty one gives the same whatever the step.
FFPA_DEVICE Run whole_steps(int begin, int end, int step) {
  return begin < end ? Run{begin / step * step, end} : Run{0, 0};
}

// Returns the keys that visible_part() returns as tiles; but the tiles begin where the visible keys do, or at the
// multiple of kStep before, which is for kernels whose copies may begin there. There may be keys behind the last one
// that exists.
template <int kStep = 1, class Block>
FFPA_DEVICE Run visible_part_from_first(const Block& block, int keys, const AttentionParams& params) {
  const int begin = visible_keys_begin(block) / kStep * kStep;
  const int tiles = ceil_div(max_of(visible_keys_end(block) - begin, 0), keys);
  if (params.splits == 1) return {begin, begin + tiles * keys};
  const int tiles_of_part = params.part_keys / keys;
  const int first_of_part = min_of(block.split() * tiles_of_part, tiles);
  return {begin + first_of_part * keys, begin + min_of(first_of_part + tiles_of_part, tiles) * keys};
}

FFPA_DEVICE Run run_over_keys(const RowTile& rows, int step) {
  return whole_steps(visible_keys_begin(rows), visible_keys_end(rows), step);
}

// Returns a bit for each of the next 64 rows of a box, of which `left` belong to the entry: bit r is 0 where row r must
// read as zeros. That is where the rows of others may follow, in packed sequences and in pages: copies read zeros
// behind the last row of a tensor.
FFPA_DEVICE uint64_t live_box_rows(int left, bool others_follow) {
  return left >= 64 || !others_follow ? ~uint64_t{0} : (uint64_t{1} << max_of(left, 0)) - 1;
}

// ---- where rows lie ----

// Returns the first element of a row. Offsets are 64-bit: a tensor may exceed 2^31 elements.
FFPA_DEVICE uint16_t* row_of(const TensorView& x, int64_t batch, int64_t head, int64_t row) {
  return x.data + batch * x.batch_stride + head * x.head_stride + row * x.row_stride;
}

// Returns the window into a head of `x` that begins at row `first` of `range` and at column `column`, of `columns`.
FFPA_DEVICE tile::GmemWindow window_of(const TensorView& x, int batch, int head, const RowRange& range, int first,
                                       int column, int columns) {
  return {row_of(x, batch, head, range.begin + first) + column, x.row_stride, range.end - range.begin - first,
          columns - column};
}

// They point to row 0 of K and V of a batch entry, in the head that a row tile has.
struct KeysInGmem {
  const uint16_t *k, *v;
  int count;
};
FFPA_DEVICE KeysInGmem keys_in_gmem(const AttentionParams& params, const RowTile& rows) {
  const int head = rows.head() / params.group, begin = rows.entry.k.begin;
  return {row_of(params.k, rows.batch(), head, begin), row_of(params.v, rows.batch(), head, begin), rows.n_k()};
}

// Starts the copy of kColumns columns of Q, from `column` on, into shared memory at `tile_smem`: kRows rows of the
// tile, by threads 0 … kThreads - 1. What does not exist becomes zeros. The caller commits, waits, and synchronises.
template <int kRows, int kColumns, int kThreads, class Layout>
FFPA_DEVICE void copy_queries_async(uint32_t tile_smem, const Layout& layout, const AttentionParams& params,
                                    const SharedRowTile& rows, int column, int thread,
                                    ptx::CallSite site = ptx::CallSite()) {
  constexpr int kChunksPerRow = kColumns / tile::kChunkElements;
  FFPA_NO_UNROLL
  for (int i = thread; i < kRows * kChunksPerRow; i += kThreads) {
    const int chunk = i % kChunksPerRow, first_column = column + chunk * tile::kChunkElements;
    const RowPlace at = rows.place(i / kChunksPerRow);
    const bool exists = at.row <= rows.last && first_column < params.d_qk;
    const uint16_t* source = row_of(params.q, rows.batch(), at.head, rows.entry.q.begin + at.row) + first_column;
    ptx::cp_async_16_or_zero(exists, tile_smem + layout.offset(i / kChunksPerRow, chunk), source, site);
  }
}

// The place of a row of a head in a tensor's map.
struct MapPlace {
  int row, head, batch;
};

// Return the places of row `row` of the entry, and of its key 0. Maps of packed sequences have no batch dimension.
FFPA_DEVICE MapPlace place_of_row(const AttentionParams& params, const RowTile& rows, int row = 0) {
  return {rows.entry.q.begin + row, rows.head(), params.is_packed() ? 0 : rows.batch()};
}
// In place of the batch entry, keys in pages have their sequence.
template <bool kPaged = false>
FFPA_DEVICE MapPlace place_of_keys(const AttentionParams& params, const RowTile& rows) {
  const bool has_batch = kPaged || !params.is_packed();
  return {rows.entry.k.begin, rows.head() / params.group, has_batch ? rows.batch() : 0};
}

}  // namespace ffpa
