// RowBlock is what a block of threads works on: some query rows of one head, where their tensors lie, and which keys
// they may see.
//
// Packed sequences are batch entries whose place and length are read here, on the device. All get as many row blocks as
// the longest one may need; row blocks beyond a sequence's rows are empty.
#pragma once

#include <cstdint>

#include "attention/attention_params.h"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace ffpa {

struct RowBlock {
  const uint16_t *q, *k, *v;  // row 0 of the batch entry, in the head
  uint16_t* out;
  float* lse;  // null where no LSE is written
  int batch, head;
  int first_row, last_row;  // no rows where last_row < first_row
  int n_q, n_k;             // rows and keys of the batch entry
  int nearest, farthest;    // row r sees the keys from r + nearest to r + farthest that exist
  int split;                // index of the part of the keys that counts, where they are split
};

// A row block that waits in shared memory for its next use: registers belong to O. All lanes of a warp read it
// together, through a shuffle: so the compiler knows that they have one value, and keeps it in a uniform register.
class KeptRowBlock {
 public:
  static constexpr uint32_t kBytes = 128;

  FFPA_DEVICE explicit KeptRowBlock(uint32_t smem) : smem_(smem) {}

  // One thread calls this; the others read after a barrier.
  FFPA_DEVICE void keep(const RowBlock& block) const {
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

// One entry of the batch: where its rows and keys lie in their tensors, and which of them meet.
struct BatchEntry {
  RowRange q, k;
  int nearest, farthest;  // row r sees the keys from r + nearest to r + farthest that exist

  FFPA_DEVICE int n_q() const { return q.end - q.begin; }
  FFPA_DEVICE int n_k() const { return k.end - k.begin; }
};

FFPA_DEVICE BatchEntry batch_entry(const AttentionParams& params, int batch) {
  BatchEntry entry = {{0, params.n_q}, {0, params.n_k}, 0, 0};
  if (params.is_packed()) {
    entry.q = rows_of_sequence(params.packed_q, batch, params.n_q);
    entry.k = rows_of_sequence(params.packed_k, batch, params.n_k);
  }
  // A window that reaches every key from every row is cut back to that: sums stay below n_q + n_k and a tile.
  const int64_t diagonal = params.top_left ? 0 : entry.n_k() - entry.n_q();
  const int64_t all_before = -entry.n_q(), all_after = entry.n_k();
  entry.nearest = int(params.left < 0 ? all_before : max_of(diagonal - params.left, all_before));
  entry.farthest = int(params.right < 0 ? all_after : min_of(diagonal + params.right, all_after));
  return entry;
}

// Returns the row block of a work item. Items count through the parts of the keys, then row blocks, heads, batch. The
// last row blocks of a head come first: under a causal mask they are the longest.
FFPA_DEVICE RowBlock row_block(const AttentionParams& params, int item, int rows) {
  const int row_blocks = ceil_div(params.n_q, rows);
  const int row_block = item / params.splits, head_of_all = row_block / row_blocks;
  RowBlock block;
  block.split = item % params.splits;
  block.batch = head_of_all / params.heads_q;
  block.head = head_of_all % params.heads_q;
  const BatchEntry entry = batch_entry(params, block.batch);
  const RowRange q = entry.q, k = entry.k;
  block.n_q = entry.n_q();
  block.n_k = entry.n_k();
  block.nearest = entry.nearest;
  block.farthest = entry.farthest;
  block.first_row = (row_blocks - 1 - row_block % row_blocks) * rows;
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

}  // namespace ffpa
