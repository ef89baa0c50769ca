// Clears what the other kernels of a packed call leave unwritten: rows of no sequence get zeros, and an LSE of -inf.
// Where offsets ascend, these rows lie in gaps: before a sequence begins and after the one before it has ended. Where a
// sequence begins before the one before it, row tiles may miss rows of sequences as well: then it is asked of each row
// whether a tile has it.
//
// A block owns a range of rows and looks at all sequences: mostly it finds nothing to do. The kernel is the last of a
// call and starts early. It does not wait for the kernel before it to read offsets, as that one began when they were
// there, nor to write gaps, where nobody else writes.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "attention/rows/packed_tiles.cuh"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"

namespace ffpa {

template <class Fields>
struct ForwardClearRowsConfig : Fields {
  using Params = AttentionParams;
  static constexpr int kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kBlocks = 256, kMostRows = 1024;  // blocks of a grid, unless a block gets more rows than that
  static constexpr int kElements = 8;                    // elements that a lane writes at a time

  static FFPA_HOST_DEVICE int rows_of_block(const Params& params) {
    return min_of((params.packed_q.total - 1) / kBlocks + 1, kMostRows);
  }

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape;
    shape.grid.x = uint32_t(max_of((params.packed_q.total - 1) / rows_of_block(params) + 1, 1));
    shape.threads = kThreads;
    shape.smem_bytes = kWarps * 4;
    shape.starts_early = true;
    return shape;
  }
};

// Clears rows of all heads, with so many threads.
template <class Config>
FFPA_DEVICE void clear_rows(const AttentionParams& params, const RowRange& rows, int thread, int threads) {
  const int chunks = params.d_v / Config::kElements, count = rows.end - rows.begin;
  for (int head = 0; head < params.heads_q; ++head) {
    for (int i = thread; i < count * chunks; i += threads) {
      uint16_t* row_gmem = row_of(params.out, 0, head, rows.begin + i / chunks);
      ptx::st_global_16(row_gmem + i % chunks * Config::kElements, {0, 0, 0, 0});
    }
    float* lse_gmem = params.lse + head * params.lse_head_stride + rows.begin;
    for (int i = thread; params.lse != nullptr && i < count; i += threads) {
      ptx::st_global_4(lse_gmem + i, float_bits(-kInfinity));
    }
  }
}

// Says whether some row tile has the row. All lanes of a warp call it together.
FFPA_DEVICE bool has_tile(const AttentionParams& params, int row) {
  const PackedRows& packed = params.packed_q;
  for (int sequence = 0; sequence < params.batch; ++sequence) {
    const RowRange rows = rows_of_sequence(packed, sequence, params.n_q);
    if (row < rows.begin || row >= rows.end) continue;
    const int first = first_tile_of_sequence(packed, sequence, params.tile_rows);
    const int tile = first + (row - rows.begin) / params.tile_rows;
    if (packed_tile(packed, params.batch, tile, params.tile_rows).sequence == sequence) return true;
  }
  return false;
}

// This says which rows lie between a sequence and the one before it, or behind all of them; and whether the sequence
// begins before the one before it.
struct Gap {
  RowRange rows;
  bool falls;
};

FFPA_DEVICE Gap gap_before(const AttentionParams& params, int sequence) {
  const PackedRows& packed = params.packed_q;
  RowRange before = {0, 0};
  int next = packed.total;
  if (sequence > 0) before = rows_of_sequence(packed, sequence - 1, params.n_q);
  if (sequence < params.batch) next = clamp(int(ptx::ld_global_4(packed.offsets + sequence)), 0, packed.total);
  return {{before.end, next}, next < before.begin};
}

template <class Config>
FFPA_KERNEL(Config::kThreads, 4)
void forward_clear_rows(FFPA_GRID_CONSTANT const AttentionParams params) {
  const int thread = ptx::thread_x(), warp = thread / 32, lane = ptx::lane_id(), gaps = params.batch + 1;
  const int first_row = int(ptx::block_x()) * Config::rows_of_block(params);
  const int end_row = first_row + min_of(Config::rows_of_block(params), params.packed_q.total - first_row);
  const auto mine = [&](const Gap& gap) {
    return RowRange{max_of(gap.rows.begin, first_row), min_of(gap.rows.end, end_row)};
  };

  // ---- each thread looks at some of the gaps; all hear what any has found ----

  constexpr uint32_t kHasRows = 1, kFalls = 2;
  uint32_t found = 0;
  for (int i = thread; i < gaps; i += Config::kThreads) {
    const Gap gap = gap_before(params, i);
    if (mine(gap).begin < mine(gap).end) found |= kHasRows;
    if (gap.falls) found |= kFalls;
  }
  found = (ptx::vote_any(found & kHasRows) ? kHasRows : 0) | (ptx::vote_any(found & kFalls) ? kFalls : 0);
  if (lane == 0) ptx::st_shared_4(ptx::dynamic_smem() + 4 * warp, found);
  ptx::sync_block();
  for (int other = 0; other < Config::kWarps; ++other) found |= ptx::ld_shared_4(ptx::dynamic_smem() + 4 * other);

  // ---- rows that no tile has ----

  if (found == kHasRows) {
    for (int first = 0; first < gaps; first += 32) {
      const RowRange rows = first + lane < gaps ? mine(gap_before(params, first + lane)) : RowRange{0, 0};
      uint32_t left = ptx::vote_ballot(rows.begin < rows.end);
      while (left != 0) {
        const int owner = ptx::bfind(left);
        left -= 1u << owner;
        const RowRange of_owner = {ptx::shfl_idx(rows.begin, owner), ptx::shfl_idx(rows.end, owner)};
        clear_rows<Config>(params, of_owner, thread, Config::kThreads);
      }
    }
  }
  ptx::wait_for_earlier_kernels();
  if ((found & kFalls) == 0) return;
  for (int row = first_row + warp; row < end_row; row += Config::kWarps) {
    if (!has_tile(params, row)) clear_rows<Config>(params, {row, row + 1}, lane, 32);
  }
}

}  // namespace ffpa
