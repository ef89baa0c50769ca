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

// Each warp copies adjacent rows of a tile: a team of lanes copies neighbouring chunks of one row, as many rows at a time
// as there are teams.
template <int kRows, int kColumns, int kThreads>
struct WarpRows {
  static constexpr int kCount = kRows / (kThreads / 32);             // of a warp
  static constexpr int kRun = min_of(kCount, kPageStep);             // of them, those that lie together
  static constexpr int kChunks = kColumns / tile::kChunkElements;    // of a row
  static constexpr int kLanes = max_of(min_of(kChunks & -kChunks, 32), 32 / kRun), kTeams = 32 / kLanes;
  static_assert(kCount % kRun == 0 && kPageStep % kRun == 0 && kChunks % kLanes == 0, "lanes have equal shares");
};

// Does what copy_tile_async does, from row `key` on, a multiple of kPageStep, and from `column` on. Each lane knows the
// page of one run of kPageStep keys, `of_lane`; warps that copy from there ask it. What pages outside the pool would
// have becomes zeros.
template <int kRows, int kColumns, int kThreads, class Layout>
FFPA_DEVICE void copy_paged_keys_async(uint32_t tile_smem, const Layout& layout, const KeyPages& key_pages,
                                       const PagedKeys& paged, const PagedWindow& window, int of_lane, int key,
                                       int column, int thread, ptx::CallSite site = ptx::CallSite()) {
  using Rows = WarpRows<kRows, kColumns, kThreads>;
  constexpr int kRun = Rows::kRun, kTeams = Rows::kTeams;
  const int lane = thread % 32, first_of_run = key + lane * kPageStep;
  const PageRow at = key_pages.place_in(paged, of_lane, window.place.row, first_of_run);
  const uint32_t found = ptx::vote_ballot(at.page != kNoPage);
  const int64_t of_run = at.page == kNoPage ? 0 : at.page * window.page_stride + at.row * window.row_stride;

  const int team = lane / Rows::kLanes, first_chunk = lane % Rows::kLanes, row_of_lane = thread / 32 * Rows::kCount + team;
  const int first_column = column + first_chunk * tile::kChunkElements;
  const uint16_t* const of_lanes = window.origin + team * window.row_stride + first_column;
  const int64_t step = kTeams * window.row_stride;
  FFPA_UNROLL
  for (int more = 0; more < Rows::kCount; more += kRun) {
    const int first = thread / 32 * Rows::kCount + more, run = first / kPageStep;
    const uint32_t low = ptx::shfl_idx(uint32_t(of_run), run), high = ptx::shfl_idx(uint32_t(of_run >> 32), run);
    const uint16_t* source = of_lanes + (int64_t(high) << 32 | low) + first % kPageStep * window.row_stride;
    const int rows = (found >> run & 1) != 0 ? window.seen.end - key - first : 0;  // that exist
    const auto copy_row = [&](int row, bool exists) {
      FFPA_UNROLL
      for (int chunk = 0; chunk < Rows::kChunks; chunk += Rows::kLanes) {
        const bool has_columns = first_column + chunk * tile::kChunkElements < window.columns;
        const uint32_t to = layout.offset(row_of_lane + row % 8, first_chunk + chunk);  // layouts repeat after 8 rows
        ptx::cp_async_16_or_zero(exists && has_columns, tile_smem + to + layout.bytes(more + row / 8 * 8),
                                 source + chunk * tile::kChunkElements, site);
      }
      source += step;
    };
    if (rows >= kRun) {
      FFPA_UNROLL
      for (int row = 0; row < kRun; row += kTeams) copy_row(row, true);
    } else {
      FFPA_NO_UNROLL
      for (int row = 0; row < kRun; row += kTeams) copy_row(row, team + row < rows);
    }
  }
}

}  // namespace ffpa
