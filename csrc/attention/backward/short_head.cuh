// ShortHead is a key/value head as mma_short.cuh takes it: its row tiles, where its P and dS lie in shared memory, and
// the steps over its columns. The steps are worked out at first and wait in shared memory: what leads from one to the
// next would take registers from sums.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/params/backward_params.h"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "tile/smem_layout.cuh"

namespace ffpa {

template <class Config>
class ShortHead {
  static constexpr int kTile = Config::kTile, kStep = Config::kStep, kColumns = Config::kColumns;

 public:
  enum class Part : int { kS, kDp, kDv, kDk, kDq };

  // A step brings rows of Q or dO, for S and dP with the same columns of K or V; for dQ it brings the keys.
  struct Step {
    Part part;
    int tile;    // row tile, counted in the block
    bool ends;   // whether it is the last one of a sum
    int lines;   // existing rows of the row tile
    int column;  // first column
    int chunks;  // existing columns / 8, no more than a step has
    const uint16_t* lines_gmem;

    FFPA_DEVICE bool is_for_pairs() const { return part <= Part::kDp; }
    FFPA_DEVICE bool is_over_rows() const { return part == Part::kDv || part == Part::kDk; }
    FFPA_DEVICE bool is_of_v() const { return part == Part::kDp || part == Part::kDv; }
  };

  // These are the head of a row tile's rows, and the first of them.
  struct Rows {
    int head, first;
  };

  FFPA_DEVICE explicit ShortHead(const BackwardParams& params)
      : params_(params),
        attention_(params.attention),
        batch_(ptx::block_x() / params.heads_kv()),
        head_kv_(ptx::block_x() % params.heads_kv()),
        q_(batch_entry(attention_, batch_).q),
        k_(batch_entry(attention_, batch_).k),
        row_tiles_(ceil_div(n_q(), kTile) * attention_.group),
        pair_steps_(row_tiles_ * Config::pair_steps(attention_.d_qk, attention_.d_v)),
        steps_(pair_steps_ + row_tiles_ * (steps_of_v() + 2 * ceil_div(attention_.d_qk, kColumns))),
        steps_smem_(live_smem() + round_up((row_tiles_ + 1) * kTile / 8, 16)) {}

  // ---- row tiles ----

  FFPA_DEVICE int n_q() const { return q_.end - q_.begin; }
  FFPA_DEVICE int n_k() const { return k_.end - k_.begin; }
  FFPA_DEVICE Rows rows_of(int tile) const {
    const int of_head = ceil_div(n_q(), kTile), head = tile / of_head;
    return {head_kv_ * attention_.group + head, (tile - head * of_head) * kTile};
  }
  FFPA_DEVICE RowTile row_tile(const Rows& rows, int offset, int count) const {
    const int first = rows.first + offset;
    return {batch_entry(attention_, batch_), batch_, rows.head, first, min_of(first + count, n_q()) - 1};
  }
  FFPA_DEVICE int64_t lse_row(const Rows& rows, int row) const {
    return batch_ * attention_.lse_batch_stride + rows.head * attention_.lse_head_stride + q_.begin + rows.first + row;
  }
  // Says whether dV is computed along with dP: no sum over row tiles has to wait for it.
  FFPA_DEVICE bool has_one_tile() const { return row_tiles_ == 1; }
  FFPA_DEVICE int steps_of_v() const { return has_one_tile() ? 0 : ceil_div(attention_.d_v, kColumns); }

  // ---- places in shared memory ----

  FFPA_DEVICE uint32_t shared_numbers_smem() const {
    return ptx::dynamic_smem() + attention_.stages * Config::kSlotBytes + Config::kRingBytes;
  }
  FFPA_DEVICE uint32_t p_of(int tile) const {
    return shared_numbers_smem() + Config::kSharedNumberBytes + tile * 2 * Config::kPairBytes;
  }
  FFPA_DEVICE uint32_t ds_of(int tile) const { return p_of(tile) + Config::kPairBytes; }

  FFPA_DEVICE uint32_t live_smem() const { return p_of(row_tiles_); }

  // ---- steps, in order: for S and dP of each row tile, then for dV, dK, and dQ ----

  // Returns step `number`. Those of gradients go from the last columns to the first: the later lines were brought, the
  // more of them are still in L2.
  FFPA_DEVICE Step step_of(int number) const {
    const int d_qk = attention_.d_qk, d_v = attention_.d_v;
    Step step;
    int column, width = kStep;
    if (number < pair_steps_) {
      const int qk_steps = ceil_div(d_qk, kStep), of_tile = qk_steps + ceil_div(d_v, kStep);
      step.tile = number / of_tile;
      const int i = number - step.tile * of_tile;
      step.part = i < qk_steps ? Part::kS : Part::kDp;
      column = (i < qk_steps ? i : i - qk_steps) * kStep;
    } else {
      const int of_v = steps_of_v(), of_qk = ceil_div(d_qk, kColumns);
      int i = number - pair_steps_;
      const int columns = i / row_tiles_;
      step.tile = i - columns * row_tiles_;
      step.part = columns < of_v ? Part::kDv : columns < of_v + of_qk ? Part::kDk : Part::kDq;
      const int end = step.part == Part::kDv ? of_v : step.part == Part::kDk ? of_v + of_qk : of_v + 2 * of_qk;
      column = (end - 1 - columns) * kColumns;
      width = kColumns;
    }
    const Rows rows = rows_of(step.tile);
    const int left = (step.is_of_v() ? d_v : d_qk) - column;
    const int first = q_.begin + rows.first;
    step.column = column;
    step.chunks = min_of(left, width) / tile::kChunkElements;
    step.lines = min_of(n_q() - rows.first, kTile);
    step.ends = step.is_for_pairs() ? left <= width : !step.is_over_rows() || step.tile + 1 == row_tiles_;
    step.lines_gmem = column + (step.part == Part::kDq ? row_of(attention_.k, batch_, head_kv_, k_.begin)
                                : step.is_of_v()       ? row_of(params_.grad_out, batch_, rows.head, first)
                                                       : row_of(attention_.q, batch_, rows.head, first));
    return step;
  }

  FFPA_DEVICE void work_out_steps(int thread) const {
    FFPA_NO_UNROLL
    for (int number = thread; number < steps_; number += Config::kThreads) {
      const Step step = step_of(number);
      const uint64_t gmem = reinterpret_cast<uint64_t>(step.lines_gmem);
      ptx::st_shared_16(steps_smem_ + number * Config::kStepBytes,
                        {uint32_t(gmem), uint32_t(gmem >> 32),
                         uint32_t(step.part) | uint32_t(step.ends) << 3 | step.tile << 4 | step.chunks << 16,
                         uint32_t(step.column | step.lines << 16)});
    }
  }
  FFPA_DEVICE Step get_step(int number) const {
    uint32_t words[4];
    ptx::ld_shared_16(words, steps_smem_ + number * Config::kStepBytes);
    return {Part(words[2] & 7),
            int(words[2] >> 4 & 0xfff),
            bool(words[2] >> 3 & 1),
            int(words[3] >> 16),
            int(words[3] & 0xffff),
            int(words[2] >> 16),
            reinterpret_cast<const uint16_t*>(words[0] | uint64_t(words[1]) << 32)};
  }

  // ---- which lines count ----
  //
  // Rows that see no key, and keys that no row sees, may hold anything: where they are summed over, they come as zeros.
  // Each row of each row tile has a bit, and after them each key.

  static FFPA_DEVICE float load_float(const float* x) { return float_from_bits(ptx::ld_global_4(x)); }

  FFPA_DEVICE void find_live_lines(int thread) const {
    if (thread >= kTile) return;
    const auto write = [&](int tile, bool is_live) {
      const uint32_t live = ptx::vote_ballot(is_live);
      if (thread % 32 == 0) ptx::st_shared_4(live_smem() + (tile * kTile + thread) / 8, live);
    };
    const RowTile rows = {batch_entry(attention_, batch_), batch_, 0, 0, n_q() - 1};
    write(row_tiles_, thread >= visible_keys_begin(rows) && thread < visible_keys_end(rows));
    FFPA_NO_UNROLL
    for (int tile = 0; tile < row_tiles_; ++tile) {
      const Rows of_tile = rows_of(tile);
      const bool exists = of_tile.first + thread < n_q();
      write(tile, exists && std::fabs(load_float(attention_.lse + lse_row(of_tile, thread))) != kInfinity);
    }
  }
  FFPA_DEVICE bool is_live(int tile, int line) const {
    return ptx::ld_shared_4(live_smem() + (tile * kTile + line) / 32 * 4) >> (line % 32) & 1;
  }

 protected:
  const BackwardParams& params_;
  const AttentionParams& attention_;
  int batch_, head_kv_;
  RowRange q_, k_;  // rows and keys of the batch entry
  int row_tiles_;
  int pair_steps_, steps_;  // steps for S and dP, and all steps
  uint32_t steps_smem_;
};

}  // namespace ffpa
