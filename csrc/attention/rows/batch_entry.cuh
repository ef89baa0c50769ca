// One entry of the batch: where its rows and keys lie, and which of them meet. Packed sequences are entries whose place
// and length are read here, on the device.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"

namespace ffpa {

// The rows [begin, end) of a packed tensor.
struct RowRange {
  int begin, end;
};

// Returns the rows of a sequence: within the tensor and no more than `longest`, whatever the offsets say.
FFPA_DEVICE RowRange rows_of_sequence(const PackedRows& packed, int sequence, int longest) {
  const int begin = clamp(int(ptx::ld_global_4(packed.offsets + sequence)), 0, packed.total);
  const int end = clamp(int(ptx::ld_global_4(packed.offsets + sequence + 1)), 0, packed.total);
  return {begin, begin + clamp(end - begin, 0, longest)};
}

struct BatchEntry {
  RowRange q, k;
  int nearest, farthest;  // row r sees the keys from r + nearest to r + farthest that exist

  FFPA_DEVICE int n_q() const { return q.end - q.begin; }
  FFPA_DEVICE int n_k() const { return k.end - k.begin; }
};

FFPA_DEVICE BatchEntry batch_entry(const AttentionParams& params, int batch) {
  BatchEntry entry = {{0, params.n_q}, {0, params.n_k}, 0, 0};
  if (params.is_packed()) {
    entry.q = rows_of_sequence(params.packed_q, batch, params.n_q);
    entry.k = rows_of_sequence(params.packed_k, batch, params.n_k);
  }
  // A window that reaches every key from every row is cut back to that: sums stay below n_q + n_k and a tile.
  const int64_t diagonal = params.top_left ? 0 : entry.n_k() - entry.n_q();
  const int64_t all_before = -entry.n_q(), all_after = entry.n_k();
  entry.nearest = int(params.left < 0 ? all_before : max_of(diagonal - params.left, all_before));
  entry.farthest = int(params.right < 0 ? all_after : min_of(diagonal + params.right, all_after));
  return entry;
}

}  // namespace ffpa
