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

// A sequence's K or V, as copies take it: `head` points to row 0 of page 0. Keys before `end` may be copied.
struct PagedWindow {
  const uint16_t* head;
  int64_t page_stride, row_stride;
  int columns, end;
};

FFPA_DEVICE tile::GmemWindow window_of_k(const AttentionParams& params, const KeysInGmem& keys) {
  return {keys.k, params.k.row_stride, keys.count, params.d_qk};
}
FFPA_DEVICE tile::GmemWindow window_of_v(const AttentionParams& params, const KeysInGmem& keys) {
  return {keys.v, params.v.row_stride, keys.count, params.d_v};
}
FFPA_DEVICE PagedWindow window_of_k(const AttentionParams& params, const PagedKeysInGmem& keys) {
  return {keys.k, params.k.batch_stride, params.k.row_stride, params.d_qk, keys.seen.end};
}
FFPA_DEVICE PagedWindow window_of_v(const AttentionParams& params, const PagedKeysInGmem& keys) {
  return {keys.v, params.v.batch_stride, params.v.row_stride, params.d_v, keys.seen.end};
}

// ---- copies ----

// Returns the page of the run of kPageStep keys that is the lane's own, of kRows keys from `key` on.
template <int kRows>
FFPA_DEVICE int page_of_lane(const KeyPages& key_pages, const PagedKeys& paged, const PagedKeysInGmem& keys, int key,
                             int lane) {
  static_assert(kRows % kPageStep == 0 && kRows / kPageStep <= 32, "each run has a lane");
  return lane < kRows / kPageStep ? key_pages.look_up(paged, keys.place(), keys.seen, key + lane * kPageStep) : kNoPage;
}

// Returns the first row, of K or of V, of the lane's own run of keys from `key` on, or null where the pool has no such
// page.
FFPA_DEVICE const uint16_t* run_of_lane(const KeyPages& key_pages, const PagedKeys& paged, const PagedKeysInGmem& keys,
                                        const PagedWindow& window, int page, int key, int lane) {
  const PageRow at = key_pages.place_in(paged, page, keys.first_row, key + lane * kPageStep);
  return at.page == kNoPage ? nullptr : window.head + at.page * window.page_stride + at.row * window.row_stride;
}

// Each warp copies adjacent rows of a tile: a team of lanes copies neighbouring chunks of one row, as many rows at a
// time as there are teams.
template <int kRows, int kColumns, int kThreads>
struct WarpRows {
  static constexpr int kCount = kRows / (kThreads / 32);           // of a warp
  static constexpr int kRun = min_of(kCount, kPageStep);           // of them, those that lie together
  static constexpr int kChunks = kColumns / tile::kChunkElements;  // of a row
  static constexpr int kLanes = max_of(min_of(kChunks & -kChunks, 32), 32 / kRun), kTeams = 32 / kLanes;
  static_assert(kCount % kRun == 0 && kPageStep % kRun == 0 && kChunks % kLanes == 0, "lanes have equal shares");
};

// Does what copy_tile_async does, from row `key` on, a multiple of kPageStep, and from `column` on. Lane first_lane has
// the first of these rows as its run (run_of_lane()), the lanes behind it have the next runs; warps that copy from
// there ask them. What pages outside the pool would have becomes zeros.
template <int kRows, int kColumns, int kThreads, class Layout>
FFPA_DEVICE void copy_paged_keys_async(uint32_t tile_smem, const Layout& layout, const PagedWindow& window,
                                       const uint16_t* of_lane, int first_lane, int key, int column, int thread,
                                       ptx::CallSite site = ptx::CallSite()) {
  using Rows = WarpRows<kRows, kColumns, kThreads>;
  constexpr int kRun = Rows::kRun, kTeams = Rows::kTeams;
  const int lane = thread % 32, team = lane / Rows::kLanes, first_chunk = lane % Rows::kLanes;
  const int row_of_warp = thread / 32 * Rows::kCount, first_column = column + first_chunk * tile::kChunkElements;
  const uint64_t bits = reinterpret_cast<uint64_t>(of_lane);
  const int64_t step = kTeams * window.row_stride;
  FFPA_UNROLL
  for (int more = 0; more < Rows::kCount; more += kRun) {
    const int first = row_of_warp + more, of_run = first_lane + first / kPageStep;
    const uint64_t low = ptx::shfl_idx(uint32_t(bits), of_run), high = ptx::shfl_idx(uint32_t(bits >> 32), of_run);
    const uint16_t* const run = reinterpret_cast<const uint16_t*>(high << 32 | low);
    const uint16_t* source = run + (first % kPageStep + team) * window.row_stride + first_column;
    const int rows = run == nullptr ? 0 : window.end - key - first;  // that exist
    const auto copy_row = [&](int row, bool exists) {
      FFPA_UNROLL
      for (int chunk = 0; chunk < Rows::kChunks; chunk += Rows::kLanes) {
        const bool has_columns = first_column + chunk * tile::kChunkElements < window.columns;
        const uint32_t to =
            layout.offset(row_of_warp + team + row % 8, first_chunk + chunk);  // layouts repeat after 8 rows
        ptx::cp_async_16_or_zero(exists && has_columns, tile_smem + to + layout.bytes(more + row / 8 * 8),
                                 source + chunk * tile::kChunkElements, site);
      }
      source += step;
    };
    if (rows >= kRun) {
      FFPA_UNROLL
      for (int row = 0; row < kRun; row += kTeams) copy_row(row, true);
    } else {
      if (run == nullptr) source = window.head;  // an address in the tensor, though nothing is read there
      FFPA_NO_UNROLL
      for (int row = 0; row < kRun; row += kTeams) copy_row(row, team + row < rows);
    }
  }
}

}  // namespace ffpa
