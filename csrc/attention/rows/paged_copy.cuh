// Copies of keys that lie in pages, by all threads of a group together; and what a kernel on mma.sync takes for them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/params/attention_params.h"
#include "attention/rows/key_pages.cuh"
#include "attention/rows/row_tile.cuh"
#include "attention/rows/row_tiles.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/tile_copy.cuh"

namespace ffpa {

template <int kRows>
struct PagedRowTileArguments {
  AttentionParams params;
  RowTiles<kRows, true> row_tiles;
  KeyPages key_pages;

  LaunchStatus fill(const AttentionParams& of_call) {
    *this = {of_call, RowTiles<kRows, true>(of_call), KeyPages(of_call)};
    return {};
  }
};
template <int kRows, bool kPaged>
using MmaArguments = std::conditional_t<kPaged, PagedRowTileArguments<kRows>, RowTileArguments<kRows>>;

// ---- where K and V of a batch entry lie, in the head that a row tile has ----

// They point to row 0 of page 0 of K and V; the sequence's first key is on row `first_row` of its page, and the row
// tile sees the keys of `seen`.
struct PagedKeysInGmem {
  const uint16_t *k, *v;
  int first_row, sequence;
  RowRange seen;

  FFPA_DEVICE MapPlace place() const { return {first_row, 0, sequence}; }
};

template <bool kPaged>
using MmaKeys = std::conditional_t<kPaged, PagedKeysInGmem, KeysInGmem>;

template <bool kPaged>
FFPA_DEVICE MmaKeys<kPaged> mma_keys(const AttentionParams& params, const RowTile& rows) {
  if constexpr (kPaged) {
    const MapPlace place = place_of_keys<true>(params, rows);
    return {row_of(params.k, 0, place.head, 0),
            row_of(params.v, 0, place.head, 0),
            place.row,
            place.batch,
            {visible_keys_begin(rows), visible_keys_end(rows)}};
  } else {
    return keys_in_gmem(params, rows);
  }
}

// What the 8-bit keys and values of a head are to be multiplied with.
struct KeyScales {
  float k = 1, v = 1;
};

FFPA_DEVICE KeyScales scales_of_head(const AttentionParams& params, const RowTile& rows) {
  const int head = rows.head() / params.group;
  const auto of_head = [&](const float* scales, int stride) {
    return scales == nullptr ? 1 : float_from_bits(ptx::ld_global_4(scales + head * stride));
  };
  return {of_head(params.paged.k_scale, params.paged.k_scale_stride),
          of_head(params.paged.v_scale, params.paged.v_scale_stride)};
}

// A sequence's K or V: as a GmemWindow, but with the rows in pages.
struct PagedWindow {
  const uint16_t* origin;
  int64_t page_stride, row_stride;
  MapPlace place;
  RowRange seen;
  int columns;
};

FFPA_DEVICE tile::GmemWindow window_of_k(const AttentionParams& params, const KeysInGmem& keys) {
  return {keys.k, params.k.row_stride, keys.count, params.d_qk};
}
FFPA_DEVICE tile::GmemWindow window_of_v(const AttentionParams& params, const KeysInGmem& keys) {
  return {keys.v, params.v.row_stride, keys.count, params.d_v};
}
FFPA_DEVICE PagedWindow window_of_k(const AttentionParams& params, const PagedKeysInGmem& keys) {
  return {keys.k, params.k.batch_stride, params.k.row_stride, keys.place(), keys.seen, params.d_qk};
}
FFPA_DEVICE PagedWindow window_of_v(const AttentionParams& params, const PagedKeysInGmem& keys) {
  return {keys.v, params.v.batch_stride, params.v.row_stride, keys.place(), keys.seen, params.d_v};
}

// ---- copies ----

// Returns the page of the run of kPageStep keys that is the lane's own, of kRows keys from `key` on.
template <int kRows>
FFPA_DEVICE int page_of_lane(const KeyPages& key_pages, const PagedKeys& paged, const PagedKeysInGmem& keys, int key,
                             int lane) {
  static_assert(kRows % kPageStep == 0 && kRows / kPageStep <= 32, "each run has a lane");
  return lane < kRows / kPageStep ? key_pages.look_up(paged, keys.place(), keys.seen, key + lane * kPageStep) : kNoPage;
}

// Does what copy_tile_async does, from row `key` on, a multiple of kPageStep, and from `column` on. Each lane knows the
// page of one run of kPageStep keys, `of_lane`; the lanes that copy from there ask it. What pages outside the pool
// would have becomes zeros.
template <int kRows, int kColumns, int kThreads, class Layout>
FFPA_DEVICE void copy_paged_keys_async(uint32_t tile_smem, const Layout& layout, const KeyPages& key_pages,
                                       const PagedKeys& paged, const PagedWindow& window, int of_lane, int key,
                                       int column, int thread, ptx::CallSite site = ptx::CallSite()) {
  using Teams = tile::ChunkTeams<kColumns, kThreads>;
  const int lane = thread % 32, first_of_run = key + lane * kPageStep;
  const PageRow at = key_pages.place_in(paged, of_lane, window.place.row, first_of_run);
  const uint32_t found = ptx::vote_ballot(at.page != kNoPage);
  const int64_t of_run = at.page == kNoPage ? 0 : at.page * window.page_stride + at.row * window.row_stride;

  // A thread takes few rows, and few copies, at a time: more would take registers from its surroundings.
  constexpr int kCopiesOfRow = Teams::kChunksPerRow / Teams::kLanes, kRowsAtATime = clamp(8 / kCopiesOfRow, 1, 4);
  constexpr int kSlice = min_of(kRows, kRowsAtATime * Teams::kTeams);
  static_assert(kRows % kSlice == 0, "tiles are whole slices");
  const int first_row = thread / Teams::kLanes, first_chunk = thread % Teams::kLanes;
  const uint32_t target = tile_smem + layout.offset(first_row, first_chunk);
  FFPA_NO_UNROLL
  for (int slice = 0; slice < kRows; slice += kSlice) {
    FFPA_UNROLL
    for (int above = 0; above < kSlice; above += Teams::kTeams) {
      const int row = first_row + slice + above, run = row / kPageStep;
      if (kRows % Teams::kTeams != 0 && row >= kRows) break;  // whole warps have no row more
      const uint32_t low = ptx::shfl_idx(uint32_t(of_run), run), high = ptx::shfl_idx(uint32_t(of_run >> 32), run);
      const int64_t of_row = (int64_t(high) << 32 | low) + row % kPageStep * window.row_stride + column;
      const bool exists = (found >> run & 1) != 0 && key + row < window.seen.end;
      FFPA_UNROLL
      for (int more = 0; more < Teams::kChunksPerRow; more += Teams::kLanes) {
        const int chunk = first_chunk + more;
        const uint32_t to = Teams::kConstantSteps ? target + layout.bytes(slice) + layout.offset(above, more)
                                                  : tile_smem + layout.offset(row, chunk);
        ptx::cp_async_16_or_zero(exists && column + chunk * tile::kChunkElements < window.columns, to,
                                 window.origin + of_row + chunk * tile::kChunkElements, site);
      }
    }
  }
}

}  // namespace ffpa
