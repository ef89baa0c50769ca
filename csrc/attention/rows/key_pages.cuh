// Where keys lie that are in the pages of a pool (PagedKeys): the way from a key's number in its sequence to a page,
// and to a row of it.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"

namespace ffpa {

inline constexpr int kPageStep = 16;  // pages have a multiple of so many rows, where a sequence has several
inline constexpr int kNoPage = -1;    // lies outside of every pool: copies by maps read zeros there

// A row of a page of the pool.
struct PageRow {
  int page, row;
};

// KeyPages is made on the host and passed with a kernel's arguments, as RowTiles is.
class KeyPages {
 public:
  KeyPages() = default;
  explicit KeyPages(const AttentionParams& params) : rows_(params.paged.rows), has_whole_boxes_(params.d_v % 64 == 0) {
    while (params.paged.entries > 1 && params.paged.rows % together_ != 0) together_ /= 2;
  }

  // Returns how many adjacent keys, from a multiple of so many on, lie in one page: a power of two, 64 at most.
  FFPA_HOST_DEVICE int together() const { return together_; }
  // Says whether a row of V is whole boxes of 64 columns.
  FFPA_HOST_DEVICE bool has_whole_boxes() const { return has_whole_boxes_; }

  // Returns where key `key` of the sequence at `place` (place_of_keys()) lies. No row of a page that is not in the pool
  // or not in the table may be read.
  FFPA_DEVICE PageRow find(const PagedKeys& paged, const MapPlace& place, int key) const {
    const int entry = paged.entries == 1 ? 0 : rows_.quotient(key);
    const int row = place.row + key - entry * rows_.value;
    int page = place.batch;
    if (paged.table != nullptr && entry < paged.entries) {
      page = int(ptx::ld_global_4(paged.table + place.batch * paged.table_stride + entry));
    }
    const bool exists = uint32_t(page) < uint32_t(paged.pages) && entry < paged.entries && row < paged.rows;
    return {exists ? page : kNoPage, row};
  }

  // Does so for the first of `count` keys that lie in one page, of which those in `seen` count: if none does, the
  // memory of these keys may hold anything, and no page is named.
  FFPA_DEVICE PageRow find_seen(const PagedKeys& paged, const MapPlace& place, const RowRange& seen, int key,
                                int count) const {
    if (key + count <= seen.begin || key >= seen.end) return {kNoPage, 0};
    return find(paged, place, key);
  }

 private:
  Divisor rows_;
  int together_ = 64;
  bool has_whole_boxes_ = true;
};

}  // namespace ffpa
