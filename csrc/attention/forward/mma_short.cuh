// Attention forward where all keys fit one tile: a warp has 16 rows, all their scores at once, and so a softmax of one
// step. One block of threads computes kTile rows of a query head:
//
//   for each kColumns of d_qk   S += Q Kᵀ
//   softmax                     P = exp2(S - maximum), 16 bits, in registers
//   for each kColumns of d_v    O = P V, divided by the row sum, goes out
//
// A ring of slots (tile/stage_ring.cuh) brings kColumns of one matrix at a time: Q and K in turn, then V. So a block
// needs little shared memory, and several blocks share a multiprocessor: while one waits for its next step, others
// compute.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "attention/rows/row_tiles.cuh"
#include "attention/softmax.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/fragments.cuh"
#include "tile/multiply.cuh"
#include "tile/smem_layout.cuh"
#include "tile/stage_ring.cuh"
#include "tile/tile_copy.cuh"

namespace ffpa {

// Fields has Dtype, and kColumns, the columns of a step.
template <class Fields>
struct ForwardMmaShortConfig : Fields {
  using Params = AttentionParams;
  using Fields::kColumns;
  static constexpr int kTile = 64;  // rows of a row tile, and keys
  static constexpr int kWarpRows = 16;
  static constexpr int kThreads = kTile / kWarpRows * 32;
  static constexpr int kBlocksPerSm = kColumns == 64 ? 6 : 3;
  static constexpr int kStages = kColumns == 64 ? 4 : 2;
  static constexpr uint32_t kSlotBytes = kTile * kColumns * 2;
  using Ring = tile::StageRing<kThreads>;

  // Shared memory holds the slots, then the ring's barriers.
  static constexpr uint32_t kBarriersSmem = kStages * kSlotBytes;
  static constexpr uint32_t kSmemBytes = kBarriersSmem + Ring::kBarrierBytes;
  static_assert(kSmemBytes <= tile::kSmemOfEveryGpu, "a block fits every GPU from sm_80 on");

  using Arguments = RowTileArguments<kTile>;

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape;
    shape.grid.x = uint32_t(RowTiles<kTile>(params).count());
    shape.threads = kThreads;
    shape.smem_bytes = kSmemBytes;
    return shape;
  }
};

template <class Config>
class ForwardMmaShort {
  using Element = typename Config::Dtype;
  static constexpr int kTile = Config::kTile, kColumns = Config::kColumns;
  static constexpr int kDepths = kColumns / 16;       // depths of a product over columns
  static constexpr int kScoreN = kTile / 8;           // fragments of the scores of a warp
  static constexpr int kOutN = kColumns / 8;          // fragments of O, of a step
  static constexpr int kAhead = Config::kStages - 1;  // steps that are brought ahead
  using Scores = float[1][1][kScoreN][4];
  using Probabilities = uint32_t[kTile / 16][4];  // as A fragments

  FFPA_HOST_DEVICE static constexpr tile::RowLayout layout() { return tile::RowLayout(kColumns * 2); }

 public:
  FFPA_DEVICE ForwardMmaShort(const AttentionParams& params, const SharedRowTile& rows)
      : params_(params),
        rows_(rows),
        keys_{visible_keys_begin(rows), visible_keys_end(rows)},
        thread_(ptx::thread_x()),
        lane_(ptx::lane_id()),
        warp_row_(thread_ / 32 * Config::kWarpRows),
        qk_steps_(ceil_div(params.d_qk, kColumns)),
        steps_(2 * qk_steps_ + ceil_div(params.d_v, kColumns)),
        ring_(ptx::dynamic_smem() + Config::kBarriersSmem, ptx::dynamic_smem(), Config::kStages, Config::kSlotBytes) {}

  FFPA_DEVICE void run() {
    ring_.init(thread_);
    ptx::sync_block();
    FFPA_NO_UNROLL
    for (int i = 0; i < kAhead; ++i) bring_step();

    RowState state;
    Probabilities p;
    {
      Scores scores;
      find_scores(scores);
      to_probabilities<Rules::kInFewRegisters, false>(scores, params_, rows_, 0, warp_row_, state, lane_);
      pack_probabilities<Element>(p, scores);
    }
    finish_rows(params_, rows_, warp_row_, state, lane_);
    find_out(p, state);
  }

 private:
  // Starts the copy of the next step, if there is one. Keys that no row sees come as zeros, as do rows past the last.
  FFPA_DEVICE void bring_step() {
    if (brought_ == steps_) return;
    const bool of_scores = brought_ < 2 * qk_steps_, of_q = of_scores && brought_ % 2 == 0;
    const int column = (of_scores ? brought_ / 2 : brought_ - 2 * qk_steps_) * kColumns;
    const TensorView& x = of_q ? params_.q : of_scores ? params_.k : params_.v;
    const int head = of_q ? rows_.head() : rows_.head() / params_.group;
    const int first = of_q ? rows_.entry.q.begin + rows_.first : rows_.entry.k.begin;
    const int begin = of_q ? 0 : keys_.begin, end = of_q ? rows_.last + 1 - rows_.first : keys_.end;
    const int columns = (of_scores ? params_.d_qk : params_.d_v) - column;
    const uint16_t* origin = row_of(x, params_.is_packed() ? 0 : rows_.batch(), head, first) + column;
    const uint32_t slot = ring_.begin_fill();
    tile::copy_chunks_async<kTile, kColumns, Config::kThreads>(
        slot, layout(), {origin, x.row_stride, end, columns}, thread_,
        [&](int line, int chunk) { return line >= begin && line < end && chunk * tile::kChunkElements < columns; },
        ptx::CallSite());
    ring_.end_fill();
    ++brought_;
  }

  // S = Q Kᵀ
  FFPA_DEVICE void find_scores(Scores& scores) {
    tile::Accumulator<float> sums[1][kScoreN];
    const tile::Coordinate a = tile::ldmatrix_a(lane_), b = tile::ldmatrix_b_pair(lane_);
    const uint32_t a_offset = layout().offset(warp_row_ + a.row, a.column), b_offset = layout().offset(b.row, b.column);
    FFPA_NO_UNROLL
    for (int step = 0; step < qk_steps_; ++step) {
      bring_step();
      uint32_t q[kDepths][4];
      const uint32_t q_smem = ring_.begin_use() + a_offset;
      FFPA_UNROLL
      for (int depth = 0; depth < kDepths; ++depth) ptx::ldmatrix_x4(q[depth], layout().moved(q_smem, 0, depth * 2));
      ring_.end_use();

      bring_step();
      const uint32_t k_smem = ring_.begin_use() + b_offset;
      tile::add_product<Element, 1, kDepths>(
          sums,
          [&](uint32_t (&fragment)[4], int, int depth) {
            FFPA_UNROLL
            for (int r = 0; r < 4; ++r) fragment[r] = q[depth][r];
          },
          [&](uint32_t (&fragments)[4], int depth, int pair) {
            ptx::ldmatrix_x4(fragments, layout().moved(k_smem, pair * 16, depth * 2));
          });
      ring_.end_use();
    }
    FFPA_UNROLL
    for (int n = 0; n < kScoreN; ++n) sums[0][n].get(scores[0][0][n]);
  }

  // O = P V, divided by the row sum
  FFPA_DEVICE void find_out(const Probabilities& p, const RowState& state) {
    const tile::Coordinate b = tile::ldmatrix_b_pair_trans(lane_);
    const uint32_t b_offset = layout().offset(b.row, b.column);
    FFPA_NO_UNROLL
    for (int column = 0; column < params_.d_v; column += kColumns) {
      bring_step();
      tile::Accumulator<float> sums[1][kOutN];
      const uint32_t v_smem = ring_.begin_use() + b_offset;
      tile::add_product<Element, 1, kTile / 16>(
          sums,
          [&](uint32_t (&fragment)[4], int, int depth) {
            FFPA_UNROLL
            for (int r = 0; r < 4; ++r) fragment[r] = p[depth][r];
          },
          [&](uint32_t (&fragments)[4], int depth, int pair) {
            ptx::ldmatrix_x4_trans(fragments, layout().moved(v_smem, depth * 16, pair * 2));
          });
      ring_.end_use();

      auto writer = out_writer<Element, kOutN>(params_, rows_, warp_row_, column, lane_);
      FFPA_UNROLL
      for (int n = 0; n < kOutN; ++n) {
        tile::scale_rows(sums[0][n], state.sum);
        writer.put(n, sums[0][n].c);
      }
    }
  }

  const AttentionParams& params_;
  const SharedRowTile& rows_;
  Run keys_;  // keys that some row sees
  int thread_, lane_;
  int warp_row_;  // first row of the warp in the row tile
  int qk_steps_, steps_;
  int brought_ = 0;  // steps whose copies have been started
  typename Config::Ring ring_;
};

template <class Config>
FFPA_KERNEL(Config::kThreads, Config::kBlocksPerSm)
void forward_mma_short(FFPA_GRID_CONSTANT const typename Config::Arguments arguments) {
  const SharedRowTile rows = arguments.row_tiles.get(arguments.params, ptx::block_x());
  if (rows.first > rows.last) return;
  ForwardMmaShort<Config>(arguments.params, rows).run();
}

}  // namespace ffpa
