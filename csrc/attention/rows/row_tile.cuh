// The rows of a query head as persistent kernels take them, and the keys or rows that one of their products runs over.
#pragma once

#include <cstdint>

#include "attention/rows/batch_entry.cuh"
#include "attention/rows/visible_keys.cuh"
#include "base/compiler.h"
#include "base/math.h"

namespace ffpa {

// A range of rows of one query head.
struct RowTile {
  BatchEntry entry;
  int batch_index, head_index;
  int first, last;  // existing rows; none where last < first

  FFPA_DEVICE int batch() const { return batch_index; }
  FFPA_DEVICE int head() const { return head_index; }
  FFPA_DEVICE int n_q() const { return entry.n_q(); }
  FFPA_DEVICE int n_k() const { return entry.n_k(); }
  FFPA_DEVICE int nearest() const { return entry.nearest; }
  FFPA_DEVICE int farthest() const { return entry.farthest; }
  FFPA_DEVICE int first_row() const { return first; }
  FFPA_DEVICE int last_row() const { return last; }
  FFPA_DEVICE int q_begin() const { return entry.q.begin; }
};

// The positions [begin, end) of keys or rows that a product runs over, in steps.
struct Run {
  int begin, end;

  FFPA_DEVICE int steps(int step) const { return ceil_div(end - begin, step); }
};

// Returns [begin, end) with its begin moved down to a whole step; an empty one gives the same whatever the step.
FFPA_DEVICE Run whole_steps(int begin, int end, int step) {
  return begin < end ? Run{begin / step * step, end} : Run{0, 0};
}

FFPA_DEVICE Run run_over_keys(const RowTile& rows, int step) {
  return whole_steps(visible_keys_begin(rows), visible_keys_end(rows), step);
}

// Returns a bit for each of the next 64 rows of a box, of which `left` belong to the entry: bit r is 0 where row r must
// read as zeros. That is for packed sequences alone: copies read zeros behind the last row of a tensor.
FFPA_DEVICE uint64_t live_box_rows(int left, bool is_packed) {
  return left >= 64 || !is_packed ? ~uint64_t{0} : (uint64_t{1} << max_of(left, 0)) - 1;
}

// The place of a row of a head in a tensor.
struct MapPlace {
  int row, head, batch;
};

}  // namespace ffpa
