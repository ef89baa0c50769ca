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

  // Returns what the table has as the page of key `key` of the sequence at `place` (place_of_keys()), for a row tile
  // that sees the keys in `seen`. Where it sees none of those that lie together with `key`, their memory may hold
  // anything, and there is no page; nor is there one behind the table's end.
  FFPA_DEVICE int look_up(const PagedKeys& paged, const MapPlace& place, const RowRange& seen, int key) const {
    const int first = key & -together_, entry = entry_of(paged, key);
    if (first + together_ <= seen.begin || first >= seen.end || entry >= paged.entries) return kNoPage;
    if (paged.table == nullptr) return place.batch;
    return int(ptx::ld_global_4(paged.table + place.batch * paged.table_stride + entry));
  }

  // Brings the table's line that has key `key` of a sequence nearer, before it is known whether there is such a key.
  FFPA_DEVICE void prefetch(const PagedKeys& paged, int sequence, int key) const {
    if (paged.table == nullptr) return;
    ptx::prefetch_global(paged.table + sequence * paged.table_stride + min_of(entry_of(paged, key), paged.entries - 1));
  }

  // Returns where key `key` lies, whose page is `found`, in a sequence that begins on row `first_row`. Its page may be
  // none of the pool.
  FFPA_DEVICE PageRow place_in(const PagedKeys& paged, int found, int first_row, int key) const {
    const int row = first_row + key - entry_of(paged, key) * rows_.value;
    return {uint32_t(found) < uint32_t(paged.pages) && row < paged.rows ? found : kNoPage, row};
  }

 private:
  FFPA_DEVICE int entry_of(const PagedKeys& paged, int key) const {
    return paged.entries == 1 ? 0 : rows_.quotient(key);
  }

  Divisor rows_;
  int together_ = 64;
  bool has_whole_boxes_ = true;
};

}  // namespace ffpa
