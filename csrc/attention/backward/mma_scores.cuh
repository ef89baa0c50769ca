// Computes P and dS of the backward on mma.sync, in tiles of kScoreRows rows × kKeyTile keys, into the workspace. For
// each tile, of which a warp has 64 rows × 64 keys:
//
//   1. S = Q Kᵀ            over d_qk, in steps of 32
//   2. P = exp2(S - LSE)   to the workspace
//   3. dP = dO Vᵀ          over d_v, in the same accumulators
//   4. dS = P ∘ (dP - δ)   to the workspace
//
// Beside 128 accumulators, registers have no room for P. A thread reads back what it has itself written, 16 bytes at a
// time: no thread waits for another. (With a softcap dS is a multiple of P times its slopes, which wait in the place of
// dS.) While a warp finishes a tile, the first steps of the next one are on their way.
#pragma once

#include <cstdint>

#include "attention/backward/pairs.cuh"
#include "attention/backward/score_tiles.cuh"
#include "attention/params/backward_params.h"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/fragments.cuh"
#include "tile/kept_value.cuh"
#include "tile/mma_core.cuh"
#include "tile/tile_copy.cuh"

namespace ffpa {

// Fields has Dtype.
template <class Fields>
struct BackwardMmaScoresConfig : Fields {
  using Params = BackwardParams;
  using Core = tile::MmaCore<typename Fields::Dtype, kKeyTile, tile::Lines::kAlong, tile::Lines::kAlong>;
  static constexpr int kThreads = Core::kThreads;
  static_assert(Core::kRows == kScoreRows, "a tile of the workspace is a tile of the core");

  // Shared memory holds the core's, and for each warp the tile in work and the next one.
  using KeptTile = tile::KeptValue<ScoreTile>;
  static constexpr uint32_t kSmemBytes = Core::kSmemBytes + Core::kThreads / 32 * 2 * KeptTile::kBytes;
  static_assert(kSmemBytes <= tile::kSmemOfEveryGpu, "a block fits every GPU from sm_80 on");

  static LaunchShape launch_shape(const Params& params) {
    return persistent_shape(score_tiles(params), params.attention.resident_blocks, kThreads, kSmemBytes);
  }
};

template <class Config>
class BackwardMmaScores {
  using Element = typename Config::Dtype;
  using Core = typename Config::Core;
  using KeptTile = typename Config::KeptTile;
  using Fragments = tile::DealtFragments;
  static constexpr int kM = Core::kM;
  static constexpr int kGroup = 4;                   // fragments that hold 16 bytes a lane
  static constexpr int kGroups = Core::kN / kGroup;  // groups in a row of fragments
  using Packed = uint32_t[kGroups][2 * kGroup];      // 16 rows as [fragment][half of rows], a pair of keys each

 public:
  FFPA_DEVICE explicit BackwardMmaScores(const BackwardParams& params)
      : params_(params),
        attention_(params.attention),
        tiles_(params),
        kept_smem_(ptx::dynamic_smem() + Core::kSmemBytes + ptx::thread_x() / 32 * 2 * KeptTile::kBytes) {}

  FFPA_DEVICE void run() {
    const int v_steps = ceil_div(attention_.d_v, Core::kStep), qk_steps = ceil_div(attention_.d_qk, Core::kStep);
    int turn = 0;
    bool more = begin_next_tile(turn);
    FFPA_NO_UNROLL
    while (more) {
      const auto bring_next = [&] { bring_step(); };
      {
        typename Core::Sums sums;
        core_.multiply(ring_, sums, qk_steps, bring_next);
        finish_p_of(kept(turn).get(), sums);
      }
      typename Core::Sums sums;
      core_.multiply(ring_, sums, v_steps, bring_next);
      finish(kept(turn), sums, [&] { more = begin_next_tile(turn ^ 1); });
      turn ^= 1;
    }
  }

 private:
  // ---- the work items of this block ----

  FFPA_DEVICE KeptTile kept(int turn) const { return KeptTile(kept_smem_ + turn * KeptTile::kBytes); }

  // Starts the copies of the next tile that is to be computed, and keeps it; returns false where there is none.
  // (Products with tiles of 128 rows never read tiles that are not computed. The wgmma kernel, whose products have
  // larger tiles, writes zeros.)
  FFPA_DEVICE bool begin_next_tile(int turn) {
    ScoreTile tile;
    do {
      if (!tiles_.next(tile)) return false;
    } while (!tile.is_computed);
    kept(turn).keep(tile, core_.lane());
    begin(tile);
    return true;
  }

  // ---- steps of Q and K, then of dO and V, on their way into shared memory ----

  FFPA_DEVICE void begin(const ScoreTile& tile) {
    const RowTile& rows = tile.rows;
    const RowRange &q = rows.entry.q, &k = rows.entry.k;
    a_ = window_of(attention_.q, rows.batch(), rows.head(), q, rows.first, 0, attention_.d_qk);
    b_ = window_of(attention_.k, rows.batch(), tile.head_kv, k, tile.first_key, 0, attention_.d_qk);
    next_a_ = row_of(params_.grad_out, rows.batch(), rows.head(), q.begin + rows.first);
    next_b_ = row_of(attention_.v, rows.batch(), tile.head_kv, k.begin + tile.first_key);
    FFPA_NO_UNROLL
    for (int step = 0; step < ring_.ahead(); ++step) bring_step();
  }

  FFPA_DEVICE void bring_step() {
    if (a_.columns <= 0) {
      if (next_a_ == nullptr) return;  // all steps of the tile are brought
      a_ = {next_a_, params_.grad_out.row_stride, a_.rows, attention_.d_v};
      b_ = {next_b_, attention_.v.row_stride, b_.rows, attention_.d_v};
      next_a_ = nullptr;
    }
    const int columns = a_.columns;
    core_.bring(
        ring_, a_, [&](int row, int chunk) { return row < a_.rows && chunk * tile::kChunkElements < columns; }, b_,
        [&](int key, int chunk) { return key < b_.rows && chunk * tile::kChunkElements < columns; });
    a_.origin += Core::kStep;
    b_.origin += Core::kStep;
    a_.columns -= Core::kStep;
  }

  // ---- what becomes of the products ----

  // Returns where this thread's pairs of the warp's first row and group lie in P and dS.
  FFPA_DEVICE int64_t first_pair(const ScoreTile& tile) const {
    const int64_t row = tile.workspace_row + core_.warp_row() + tile::c_coordinate(core_.lane(), 0).row;
    const int column = tile.workspace_column + core_.warp_column() + Fragments::first_column(core_.lane());
    return row * params_.workspace_columns() + column;
  }

  // Stores packed pairs of 16 rows, 16 bytes at a time.
  FFPA_DEVICE void store(uint16_t* gmem, const Packed& packed) const {
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      FFPA_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        const uint32_t (&x)[2 * kGroup] = packed[group];
        ptx::st_global_16(gmem + Fragments::column_of(group * kGroup), {x[h], x[2 + h], x[4 + h], x[6 + h]});
      }
      gmem += int64_t{8} * params_.workspace_columns();
    }
  }

  FFPA_DEVICE void load(const uint16_t* gmem, Packed& packed) const {
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      FFPA_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        uint32_t chunk[4];
        ptx::ld_global_16(chunk, gmem + Fragments::column_of(group * kGroup));
        FFPA_UNROLL
        for (int i = 0; i < kGroup; ++i) packed[group][2 * i + h] = chunk[i];
      }
      gmem += int64_t{8} * params_.workspace_columns();
    }
  }

  using Statistics = float[kM][2];
  FFPA_DEVICE void load_all_statistics(const ScoreTile& tile, Statistics& lse2, Statistics& delta) const {
    FFPA_UNROLL
    for (int m = 0; m < kM; ++m) {
      load_statistics(params_, tile.rows, tile.rows.first + core_.warp_row() + m * 16, core_.lane(), lse2[m], delta[m]);
    }
  }

  FFPA_DEVICE bool has_softcap() const { return attention_.softcap > 0; }
  FFPA_DEVICE int64_t rows_16() const { return int64_t{16} * params_.workspace_columns(); }

  FFPA_DEVICE void finish_p_of(const ScoreTile& tile, const typename Core::Sums& sums) const {
    Statistics lse2, delta;
    load_all_statistics(tile, lse2, delta);
    const bool all_seen = tile.all_seen();
    int64_t at = first_pair(tile);
    FFPA_UNROLL
    for (int m = 0; m < kM; ++m, at += rows_16()) {
      const bool linear = are_linear(attention_, lse2[m]), all_see = all_seen && none_blind(lse2[m]);
      const int row = tile.rows.first + core_.warp_row() + m * 16;
      Packed p, slopes = {};
      FFPA_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        float scores[1][kGroup][4];
        FFPA_UNROLL
        for (int n = 0; n < kGroup; ++n) sums[m][group * kGroup + n].get(scores[0][n]);
        const int key = tile.first_key + core_.warp_column() + Fragments::column_of(group * kGroup);
        if (linear) {
          linear_exponents<Element>(scores, attention_.score_factor, lse2[m]);
          if (!all_see) hide_pairs<Fragments>(scores, tile.rows, row, key, lse2[m], core_.lane());
        } else {
          exponents_by_rules<Element, Fragments>(
              scores, attention_, tile.rows, all_see, row, key, lse2[m], core_.lane(), slopes[group],
              [&](RowShare(&shares)[2]) { load_shares(params_, tile.rows, row, core_.lane(), shares); });
        }
        finish_p<Element>(scores, p[group]);
      }
      store(params_.p + at, p);
      if (!has_softcap()) continue;
      FFPA_UNROLL
      for (int group = 0; group < kGroups; ++group)
        apply_slopes<Element>(p[group], slopes[group], all_see && attention_.mask.kind == MaskKind::kNone);
      store(params_.ds + at, p);
    }
  }

  // All that is read from global memory is loaded before it is needed: statistics of all rows at first, P 16 rows
  // ahead. begin_next() is called while the first P is on its way.
  template <class BeginNext>
  FFPA_DEVICE void finish(const KeptTile& kept, const typename Core::Sums& sums, const BeginNext& begin_next) const {
    const int64_t first = first_pair(kept.get());
    const uint16_t* p_gmem = (has_softcap() ? params_.ds : params_.p) + first;
    uint16_t* ds_gmem = params_.ds + first;
    Packed p[2];  // P of these 16 rows and the next
    load(p_gmem, p[0]);
    Statistics lse2, delta;
    load_all_statistics(kept.get(), lse2, delta);
    begin_next();
    const bool all_seen = kept.get().all_seen();
    FFPA_UNROLL
    for (int m = 0; m < kM; ++m, ds_gmem += rows_16()) {
      const bool all_count = all_seen && none_blind(lse2[m]) && attention_.mask.kind == MaskKind::kNone;
      p_gmem += rows_16();
      if (m + 1 < kM) load(p_gmem, p[(m + 1) % 2]);
      Packed ds;
      FFPA_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        float dp[1][kGroup][4];
        FFPA_UNROLL
        for (int n = 0; n < kGroup; ++n) sums[m][group * kGroup + n].get(dp[0][n]);
        finish_ds<Element>(dp, p[m % 2][group], all_count, delta[m], ds[group]);
      }
      store(ds_gmem, ds);
    }
  }

  const BackwardParams& params_;
  const AttentionParams& attention_;
  ScoreTileSequence<false> tiles_;
  Core core_;
  typename Core::Ring ring_ = Core::make_ring();
  uint32_t kept_smem_;
  tile::GmemWindow a_, b_;            // rest of the operands that come now; a_ counts the columns
  const uint16_t *next_a_, *next_b_;  // operands that follow them
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void backward_mma_scores(FFPA_GRID_CONSTANT const BackwardParams params) {
  BackwardMmaScores<Config>(params).run();
}

}  // namespace ffpa
