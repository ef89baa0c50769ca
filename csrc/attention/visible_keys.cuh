// Which keys a block of rows meets: the one place that knows what causal, window and alignment mean on the device.
#pragma once

#include "attention/attention_params.h"
#include "base/compiler.h"
#include "base/math.h"

namespace ffpa {

// Rows [first_row, last_row] of one head against the keys of its key/value head.
class VisibleKeys {
 public:
  FFPA_DEVICE VisibleKeys(const AttentionParams& params, int first_row, int last_row)
      : n_k_(params.n_k),
        first_row_low_(first_row + params.shift - params.left),
        last_row_low_(last_row + params.shift - params.left),
        first_row_high_(first_row + params.shift + params.right),
        last_row_high_(last_row + params.shift + params.right) {}

  // Keys that some row sees: [begin, end), empty if begin >= end.
  FFPA_DEVICE int begin() const { return max_of(first_row_low_, 0); }
  FFPA_DEVICE int end() const { return min_of(last_row_high_ + 1, n_k_); }

  // Whether every row sees each of `count` keys from `key` on: such a tile needs no mask.
  FFPA_DEVICE bool all_see(int key, int count) const {
    return key >= last_row_low_ && key + count - 1 <= first_row_high_ && key + count <= n_k_;
  }

 private:
  int n_k_;
  int first_row_low_, last_row_low_;    // the first key that the first (last) row sees
  int first_row_high_, last_row_high_;  // the last one
};

FFPA_DEVICE bool row_sees_key(const AttentionParams& params, int row, int key) {
  const int diagonal = row + params.shift;
  return key >= diagonal - params.left && key <= diagonal + params.right && key < params.n_k;
}

}  // namespace ffpa
