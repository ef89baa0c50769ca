// Appends new rows of K and V to sequences whose keys lie in pages: row i of a sequence becomes its key `used` + i.
// What has no place there is written nowhere: rows past the last page of their sequence, rows whose page is not in the
// pool, and packed rows of no sequence.
//
// Elements are copied as bits. A lane has one chunk of a row, of K or of V, which is on its way before the place is
// known: a call of few rows lasts as long as its two reads that wait for each other, of `used` and of the table.
#pragma once

#include <cstdint>

#include "attention/params/append_params.h"
#include "attention/rows/key_pages.cuh"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"

namespace ffpa {

template <class Fields>
struct ForwardAppendRowsConfig : Fields {
  using Params = AppendParams;
  static constexpr int kThreads = 128, kWarps = kThreads / 32;
  static constexpr int kElements = 8;  // elements of a chunk

  // Returns how many warps have a row of all heads. No warp has chunks of two rows.
  static FFPA_HOST_DEVICE int warps_of_row(const Params& params) {
    return ceil_div(params.heads * (params.columns + params.value_columns), 32 * kElements);
  }

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape;
    shape.grid.x = uint32_t(ceil_div(params.all_rows() * warps_of_row(params), int64_t{kWarps}));
    shape.threads = kThreads;
    return shape;
  }
};

// This is a new row: the sequence that it belongs to, or -1, and its number there.
struct NewRow {
  int sequence, row;
};

// Returns whose a packed row is. The lanes of a warp ask 32 sequences at a time.
FFPA_DEVICE NewRow packed_row(const AppendParams& params, int row) {
  for (int first = 0; first < params.batch; first += 32) {
    const int sequence = first + ptx::lane_id();
    int begin = 0, end = 0;
    if (sequence < params.batch) {
      begin = max_of(int(ptx::ld_global_4(params.paged.added + sequence)), 0);
      end = int(ptx::ld_global_4(params.paged.added + sequence + 1));
    }
    const int owner = ptx::bfind(ptx::vote_ballot(begin <= row && row < end));
    if (owner >= 0) return {first + owner, row - ptx::shfl_idx(begin, owner)};
  }
  return {-1, 0};
}

FFPA_DEVICE PageRow page_of_new_row(const AppendParams& params, const NewRow& at) {
  const PagedKeys& paged = params.paged;
  if (at.sequence < 0) return {kNoPage, 0};
  const int used = int(ptx::ld_global_4(paged.used + at.sequence));
  const uint32_t position = uint32_t(used) + uint32_t(at.row), entry = position / uint32_t(paged.rows);
  if (used < 0 || entry >= uint32_t(paged.entries)) return {kNoPage, 0};
  int page = at.sequence;
  if (paged.table != nullptr) page = int(ptx::ld_global_4(paged.table + at.sequence * paged.table_stride + entry));
  return {uint32_t(page) < uint32_t(paged.pages) ? page : kNoPage, int(position % uint32_t(paged.rows))};
}

template <class Config>
FFPA_KERNEL(Config::kThreads, 4)
void forward_append_rows(FFPA_GRID_CONSTANT const AppendParams params) {
  const uint32_t warp = ptx::block_x() * uint32_t{Config::kWarps} + ptx::thread_x() / 32;
  const uint32_t warps_of_row = Config::warps_of_row(params), row_of_all = warp / warps_of_row;
  if (row_of_all >= params.all_rows()) return;

  // ---- a chunk: K's of all heads come first, then V's ----

  int column = (int(warp % warps_of_row) * 32 + ptx::lane_id()) * Config::kElements;
  const bool of_values = column >= params.heads * params.columns;
  if (of_values) column -= params.heads * params.columns;
  const int columns = of_values ? params.value_columns : params.columns;
  const bool exists = column < params.heads * columns;
  const int head = exists ? column / columns : 0;
  column -= head * columns;

  const int sequence = params.is_packed() ? 0 : int(row_of_all / uint32_t(params.rows));
  const int row = int(row_of_all - uint32_t(sequence) * uint32_t(params.rows));
  uint32_t chunk[4] = {};
  if (exists) ptx::ld_global_16(chunk, row_of(of_values ? params.v : params.k, sequence, head, row) + column);

  // ---- its place ----

  const PageRow to = page_of_new_row(params, params.is_packed() ? packed_row(params, row) : NewRow{sequence, row});
  if (!exists || to.page == kNoPage) return;
  ptx::st_global_16(row_of(of_values ? params.v_pages : params.k_pages, to.page, head, to.row) + column, chunk);
}

}  // namespace ffpa
