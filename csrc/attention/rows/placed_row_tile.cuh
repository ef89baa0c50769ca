// PlacedRowTile is what a block of threads works on: a row tile of one head, where its tensors lie, and which keys its
// rows may see.
//
// Packed sequences are batch entries whose place and length are read here, on the device. All get as many row tiles as
// the longest one may need; row tiles beyond a sequence's rows are empty.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"

namespace ffpa {

struct PlacedRowTile {
  const uint16_t *q, *k, *v;  // row 0 of the batch entry, in the head
  uint16_t* out;
  float* lse;  // null where no LSE is written
  int batch, head;
  int first_row, last_row;  // no rows where last_row < first_row
  int n_q, n_k;             // rows and keys of the batch entry
  int nearest, farthest;    // row r sees the keys from r + nearest to r + farthest that exist
  int split;                // index of the part of the keys that counts, where they are split
};

// A row tile that waits in shared memory for its next use: registers belong to O. All lanes of a warp read it
// together, through a shuffle: so the compiler knows that they have one value, and keeps it in a uniform register.
class KeptPlacedRowTile {
 public:
  static constexpr uint32_t kBytes = 128;

  FFPA_DEVICE explicit KeptPlacedRowTile(uint32_t smem) : smem_(smem) {}

  // One thread calls this; the others read after a barrier.
  FFPA_DEVICE void keep(const PlacedRowTile& block) const {
    const void* const pointers[] = {block.q, block.k, block.v, block.out, block.lse};
    const int numbers[] = {block.batch, block.head,    block.first_row, block.last_row, block.n_q,
                           block.n_k,   block.nearest, block.farthest,  block.split};
    FFPA_UNROLL
    for (int i = 0; i < 5; ++i) {
      const uint64_t bits = reinterpret_cast<uint64_t>(pointers[i]);
      ptx::st_shared_8(smem_ + 8 * i, {uint32_t(bits), uint32_t(bits >> 32)});
    }
    FFPA_UNROLL
    for (int i = 0; i < 9; ++i) ptx::st_shared_4(smem_ + kNumbers + 4 * i, uint32_t(numbers[i]));
  }

  FFPA_DEVICE const uint16_t* q() const { return pointer<const uint16_t>(0); }
  FFPA_DEVICE const uint16_t* k() const { return pointer<const uint16_t>(1); }
  FFPA_DEVICE const uint16_t* v() const { return pointer<const uint16_t>(2); }
  FFPA_DEVICE uint16_t* out() const { return pointer<uint16_t>(3); }
  FFPA_DEVICE float* lse() const { return pointer<float>(4); }
  FFPA_DEVICE int batch() const { return number(0); }
  FFPA_DEVICE int head() const { return number(1); }
  FFPA_DEVICE int first_row() const { return number(2); }
  FFPA_DEVICE int last_row() const { return number(3); }
  FFPA_DEVICE int n_q() const { return number(4); }
  FFPA_DEVICE int n_k() const { return number(5); }
  FFPA_DEVICE int nearest() const { return number(6); }
  FFPA_DEVICE int farthest() const { return number(7); }
  FFPA_DEVICE int split() const { return number(8); }

 private:
  static constexpr uint32_t kNumbers = 64;

  template <class Type>
  FFPA_DEVICE Type* pointer(int i) const {
    uint32_t bits[2];
    ptx::ld_shared_8(bits, smem_ + 8 * i);
    return reinterpret_cast<Type*>(ptx::shfl_idx(bits[0], 0) | uint64_t(ptx::shfl_idx(bits[1], 0)) << 32);
  }
  FFPA_DEVICE int number(int i) const { return int(ptx::shfl_idx(ptx::ld_shared_4(smem_ + kNumbers + 4 * i), 0)); }

  uint32_t smem_;
};

// Returns the row tile of a work item. Items count through the parts of the keys, then row tiles, heads, batch. The
// last row tiles of a head come first: under a causal mask they are the longest.
FFPA_DEVICE PlacedRowTile placed_row_tile(const AttentionParams& params, int item, int rows) {
  const int row_tiles = ceil_div(params.n_q, rows);
  const int row_tile = item / params.splits, head_of_all = row_tile / row_tiles;
  PlacedRowTile block;
  block.split = item % params.splits;
  block.batch = head_of_all / params.heads_q;
  block.head = head_of_all % params.heads_q;
  const BatchEntry entry = batch_entry(params, block.batch);
  const RowRange q = entry.q, k = entry.k;
  block.n_q = entry.n_q();
  block.n_k = entry.n_k();
  block.nearest = entry.nearest;
  block.farthest = entry.farthest;
  block.first_row = (row_tiles - 1 - row_tile % row_tiles) * rows;
  block.last_row = min_of(block.first_row + rows, block.n_q) - 1;

  // Offsets are 64-bit: a tensor may exceed 2^31 elements.
  const auto row_of = [&](const TensorView& x, int64_t head, int64_t row) {
    return x.data + block.batch * x.batch_stride + head * x.head_stride + row * x.row_stride;
  };
  block.q = row_of(params.q, block.head, q.begin);
  block.k = row_of(params.k, block.head / params.group, k.begin);
  block.v = row_of(params.v, block.head / params.group, k.begin);
  block.out = row_of(params.out, block.head, q.begin);
  block.lse = params.lse == nullptr
                  ? nullptr
                  : params.lse + block.batch * params.lse_batch_stride + block.head * params.lse_head_stride + q.begin;
  return block;
}

// ---- work items ----
//
// They are numbered: those of a head, then head after head, then batch entry after batch entry. A block takes the item
// that has the block's own number, whatever the shape of the grid.

// Returns a grid of one block for each item, or of at most `most` blocks, which then take several items each.
inline GridDim grid_of(const AttentionParams& params, int items_of_head, int most = kLargestInt) {
  if (!params.grid_of_heads) return {uint32_t(min_of(items_of_head * params.heads_q * params.batch, most))};
  const int z = min_of(params.batch, most), y = min_of(params.heads_q, most / z);
  return {uint32_t(min_of(items_of_head, most / (y * z))), uint32_t(y), uint32_t(z)};
}

FFPA_DEVICE int block_number() {
  return ptx::block_x() + ptx::grid_x() * (ptx::block_y() + ptx::grid_y() * ptx::block_z());
}
FFPA_DEVICE int blocks_of_grid() { return ptx::grid_x() * ptx::grid_y() * ptx::grid_z(); }

}  // namespace ffpa
