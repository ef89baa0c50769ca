// Clears what the other kernels of a packed call leave unwritten: rows of no sequence get zeros, and an LSE of -inf.
// These rows lie in gaps: before a sequence begins and after the one before it has ended. Where a sequence begins
// before the one before it, row tiles miss rows of sequences as well: then all rows are cleared.
//
// A block owns a range of rows, and each of its warps looks at all sequences: mostly they find nothing to do. The
// kernel is the last of a call and starts early. It does not wait for the kernel before it to read offsets, as that one
// began when they were there, nor to write gaps, where nobody else writes.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"

namespace ffpa {

template <class Fields>
struct ForwardClearRowsConfig : Fields {
  using Params = AttentionParams;
  static constexpr int kThreads = 256;
  static constexpr int kBlocks = 256, kMostRows = 1024;  // blocks of a grid, unless a block gets more rows than that
  static constexpr int kElements = 8;                    // elements that a lane writes at a time

  static FFPA_HOST_DEVICE int rows_of_block(const Params& params) {
    return clamp(ceil_div(params.packed_q.total, kBlocks), 1, kMostRows);
  }
  static FFPA_HOST_DEVICE int blocks(const Params& params) {
    return max_of(ceil_div(params.packed_q.total, rows_of_block(params)), 1);
  }

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape;
    shape.grid.x = uint32_t(blocks(params));
    shape.threads = kThreads;
    shape.starts_early = true;
    return shape;
  }
};

// Clears rows of all heads, with all threads of the block.
template <class Config>
FFPA_DEVICE void clear_rows(const AttentionParams& params, const RowRange& rows) {
  const int chunks = params.d_v / Config::kElements, count = rows.end - rows.begin;
  for (int head = 0; head < params.heads_q; ++head) {
    for (int i = ptx::thread_x(); params.out.data != nullptr && i < count * chunks; i += Config::kThreads) {
      uint16_t* row_gmem = row_of(params.out, 0, head, rows.begin + i / chunks);
      ptx::st_global_16(row_gmem + i % chunks * Config::kElements, {0, 0, 0, 0});
    }
    float* lse_gmem = params.lse + head * params.lse_head_stride + rows.begin;
    for (int i = ptx::thread_x(); params.lse != nullptr && i < count; i += Config::kThreads) {
      ptx::st_global_4(lse_gmem + i, float_bits(-kInfinity));
    }
  }
}

template <class Config>
FFPA_KERNEL(Config::kThreads, 4)
void forward_clear_rows(FFPA_GRID_CONSTANT const AttentionParams params) {
  const PackedRows& packed = params.packed_q;
  const int first_row = int(ptx::block_x()) * Config::rows_of_block(params);
  const RowRange mine = {first_row, min_of(first_row + Config::rows_of_block(params), packed.total)};

  // ---- gaps: number i lies before sequence i, and the last one behind all sequences ----

  bool falls = false;
  for (int first = 0; first <= params.batch; first += 32) {
    const int sequence = first + ptx::lane_id();
    const bool exists = sequence <= params.batch;
    RowRange before = {0, 0};  // the rows of the sequence before the gap
    int next = packed.total;   // the row on which the sequence behind it begins
    if (exists && sequence > 0) before = rows_of_sequence(packed, sequence - 1, params.n_q);
    if (sequence < params.batch) next = clamp(int(ptx::ld_global_4(packed.offsets + sequence)), 0, packed.total);
    falls = falls || next < before.begin;
    const RowRange gap = {max_of(before.end, mine.begin), min_of(next, mine.end)};
    uint32_t gaps = ptx::vote_ballot(exists && gap.begin < gap.end);
    while (gaps != 0) {
      const int owner = ptx::bfind(gaps);
      gaps -= 1u << owner;
      clear_rows<Config>(params, {ptx::shfl_idx(gap.begin, owner), ptx::shfl_idx(gap.end, owner)});
    }
  }
  ptx::wait_for_earlier_kernels();
  if (!ptx::vote_any(falls)) return;

  // ---- offsets fall somewhere ----

  ptx::sync_block();  // gaps are written by other threads
  clear_rows<Config>(params, mine);
}

}  // namespace ffpa
