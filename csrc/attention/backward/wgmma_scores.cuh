// Computes P and dS of the backward on wgmma, in tiles of kScoreRows rows × kKeyTile keys, into the workspace. For each
// tile, of which a warpgroup has 64 rows:
//
//   1. S = Q Kᵀ            over d_qk, in steps of 64
//   2. P = exp2(S - LSE)   packed to 16 bits: to the workspace, and beside the accumulators
//   3. dP = dO Vᵀ          over d_v, in the same accumulators
//   4. dS = P ∘ (dP - δ)   to the workspace; with a softcap a multiple of P times its slopes
//
// What steps 2 and 4 write leaves for memory while the next product runs: an SM can write 32 bytes a cycle, and where
// all SMs write, each gets not much more than half of that. One warp finds tiles, and is ahead; another brings their
// boxes.
#pragma once

#include <cstdint>

#include "attention/backward/pairs.cuh"
#include "attention/backward/score_tiles.cuh"
#include "attention/backward/tile_queue.cuh"
#include "attention/mask_pairs.cuh"
#include "attention/params/backward_params.h"
#include "attention/rows/row_tile.cuh"
#include "attention/tensor_maps.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/box_ring.cuh"
#include "tile/register_parts.cuh"

namespace ffpa {

// A score tile in shared memory.
class KeptScoreTile : public KeptNumbers<15> {
 public:
  using KeptNumbers<15>::KeptNumbers;

  static FFPA_DEVICE void put(TileQueue<KeptScoreTile>& queue, const ScoreTile& tile) {
    const RowTile& rows = tile.rows;
    queue.put({rows.batch(), rows.head(), rows.first_row(), rows.last_row(), rows.n_q(), rows.n_k(), rows.nearest(),
               rows.farthest(), rows.q_begin(), tile.first_key, int(tile.workspace_row), tile.workspace_column,
               tile.is_computed, rows.entry.k.begin, tile.head_kv});
  }

  FFPA_DEVICE int batch() const { return number(0); }
  FFPA_DEVICE int head() const { return number(1); }
  FFPA_DEVICE int first_row() const { return number(2); }
  FFPA_DEVICE int last_row() const { return number(3); }
  FFPA_DEVICE int n_q() const { return number(4); }
  FFPA_DEVICE int n_k() const { return number(5); }
  FFPA_DEVICE int nearest() const { return number(6); }
  FFPA_DEVICE int farthest() const { return number(7); }
  FFPA_DEVICE int q_begin() const { return number(8); }
  FFPA_DEVICE int first_key() const { return number(9); }
  FFPA_DEVICE int workspace_row() const { return number(10); }
  FFPA_DEVICE int workspace_column() const { return number(11); }
  FFPA_DEVICE bool is_computed() const { return number(12) != 0; }
  FFPA_DEVICE int k_begin() const { return number(13); }
  FFPA_DEVICE int head_kv() const { return number(14); }

  // Says whether all rows of the tile exist and see all of its keys.
  FFPA_DEVICE bool all_seen() const {
    return all_rows_see(*this, first_key(), kKeyTile) && last_row() - first_row() == kScoreRows - 1;
  }
};

// Fields has Dtype.
template <class Fields>
struct BackwardWgmmaScoresConfig : Fields {
  using Params = BackwardParams;
  using Ring = tile::BoxRing<kScoreRows / tile::kBox, kKeyTile / tile::kBox, 4>;
  static constexpr int kThreads = tile::kCoreThreads;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // registers of a thread

  // Shared memory holds slots of the ring; for each warp, rows of P or dS on their way; barriers; tiles.
  using Queue = TileQueue<KeptScoreTile>;
  using Stores = tile::RowStores<2>;
  static constexpr uint32_t kBarriersAt = Ring::kBytes + tile::kConsumerWarps * Stores::kBytes;
  static constexpr uint32_t kSmemBytes = kBarriersAt + Ring::kBarrierBytes + Queue::kBytes;

  static LaunchShape launch_shape(const Params& params) {
    return persistent_shape(score_tiles(params), params.attention.resident_blocks, kThreads, kSmemBytes);
  }

  struct Arguments {
    Params params;
    ptx::TensorMap q, k, v, grad_out, p, ds;

    LaunchStatus fill(const Params& of_call) {
      params = of_call;
      const AttentionParams& a = params.attention;
      const LaunchStatus statuses[] = {
          map_queries(q, a, a.q, a.d_qk),
          map_keys(k, a, a.k, a.d_qk),
          map_keys(v, a, a.v, a.d_v),
          map_queries(grad_out, a, params.grad_out, a.d_v),
          map_matrix(p, params.p, params.workspace_columns(), params.workspace_rows(), tile::kStoredRows),
          map_matrix(ds, params.ds, params.workspace_columns(), params.workspace_rows(), tile::kStoredRows)};
      return first_failure(statuses);
    }
  };
};

template <class Config>
class BackwardWgmmaScores {
  using Element = typename Config::Dtype;
  using Ring = typename Config::Ring;
  using Arguments = typename Config::Arguments;

  static constexpr int kBoxFragments = tile::kBox / 8;  // fragments of a row in one box
  static constexpr int kPartFragments = 4;              // fragments that rules are applied to at a time
  static constexpr int kPartPairs = 2 * kPartFragments;
  static constexpr int kBoxes = kKeyTile / tile::kBox;
  using Sums = float[1][kKeyTile / 2];
  using Packed = uint32_t[kKeyTile / 4];      // [fragment][half of rows], a pair of keys each
  using Words = uint32_t[2 * kBoxFragments];  // of a mask, in the same order

 public:
  FFPA_DEVICE explicit BackwardWgmmaScores(const Arguments& arguments)
      : arguments_(arguments),
        params_(arguments.params),
        attention_(arguments.params.attention),
        lane_(ptx::lane_id()),
        warp_(ptx::shfl_idx(ptx::thread_x() / 32, 0)),  // the shuffle tells the compiler: one value for the warp
        ring_{ptx::dynamic_smem(), ptx::dynamic_smem() + Config::kBarriersAt},
        queue_(ring_.barriers_smem + Ring::kBarrierBytes) {}

  FFPA_DEVICE void run() {
    if (ptx::thread_x() == 0) {
      queue_.init(1 + tile::kConsumerWarps);
      ring_.init();
      if (ptx::block_x() == 0) ptx::st_global_8(params_.taken(true), {0, 0});  // products of the chunk come later
    }
    ptx::sync_block();
    tile::run_roles<Config, 2>(
        warp_, [&](int warp) { warp == 0 ? bring() : find(); },
        [&](int group, int group_warp) { consume(group, group_warp); });
  }

 private:
  FFPA_DEVICE int qk_steps() const { return ceil_div(attention_.d_qk, tile::kBox); }
  FFPA_DEVICE int v_steps() const { return ceil_div(attention_.d_v, tile::kBox); }

  // ---- the warp that finds tiles ----

  FFPA_DEVICE void find() {
    ScoreTileSequence<true> tiles(params_);
    ScoreTile tile;
    FFPA_NO_UNROLL
    while (tiles.next(tile)) {
      if (lane_ == 0) KeptScoreTile::put(queue_, tile);
    }
    if (lane_ == 0) queue_.put_end();
  }

  // ---- the warp that brings their boxes ----

  FFPA_DEVICE void bring() {
    tile::BoxProducer<Ring> producer(ring_, lane_);
    FFPA_NO_UNROLL
    for (;; queue_.release(lane_)) {
      const KeptScoreTile tile = queue_.get();
      if (!tile.exists()) break;
      if (!tile.is_computed()) continue;
      const int batch = attention_.is_packed() ? 0 : tile.batch();
      const MapPlace q = {tile.q_begin() + tile.first_row(), tile.head(), batch};
      const MapPlace k = {tile.k_begin() + tile.first_key(), tile.head_kv(), batch};
      bring_steps(producer, arguments_.q, q, arguments_.k, k, qk_steps());
      bring_steps(producer, arguments_.grad_out, q, arguments_.v, k, v_steps());
    }
  }

  FFPA_DEVICE void bring_steps(tile::BoxProducer<Ring>& producer, const ptx::TensorMap& a, const MapPlace& rows,
                               const ptx::TensorMap& b, const MapPlace& keys, int steps) const {
    FFPA_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      producer.bring([&](uint32_t boxes_smem, uint32_t barrier) {
        const int column = step * tile::kBox;
        for (int box = 0; box < Ring::kBoxesA; ++box, boxes_smem += tile::kBoxBytes) {
          load_box(boxes_smem, a, barrier, rows, column, box * tile::kBox);
        }
        for (int box = 0; box < Ring::kBoxesB; ++box, boxes_smem += tile::kBoxBytes) {
          load_box(boxes_smem, b, barrier, keys, column, box * tile::kBox);
        }
      });
    }
  }

  // ---- the warpgroups that multiply ----

  FFPA_DEVICE void consume(int group, int group_warp) {
    tile::BoxConsumer<Ring> consumer(ring_, group, lane_);
    const int warp = group * tile::kGroupWarps + group_warp, row = warp * 16;  // first row of the warp in a tile
    typename Config::Stores stores(ring_.slots_smem + Ring::kBytes + warp * Config::Stores::kBytes, lane_);
    const bool mask_has_words = has_mask_pairs(attention_.mask);
    FFPA_NO_UNROLL
    for (;; queue_.release(lane_)) {
      const KeptScoreTile tile = queue_.get();
      if (!tile.exists()) break;
      const auto store = [&](const ptx::TensorMap& map, int box, const tile::PackedRows& packed) {
        const int column = tile.workspace_column() + box * tile::kBox;
        const int row_of_all = tile.workspace_row() + row;
        stores.store(packed, [&](uint32_t smem) { ptx::tma_store_2d(&map, smem, column, row_of_all); });
      };
      if (!tile.is_computed()) {
        const tile::PackedRows zeros = {};
        FFPA_NO_UNROLL
        for (int box = 0; box < kBoxes; ++box) store(arguments_.p, box, zeros);
        FFPA_NO_UNROLL
        for (int box = 0; box < kBoxes; ++box) store(arguments_.ds, box, zeros);
        continue;
      }
      float lse2[2], delta[2];
      load_statistics(params_, tile, tile.first_row() + row, lane_, lse2, delta);

      const bool has_words = mask_has_words && tile.first_key() + kKeyTile <= tile.n_k();
      const MaskPairs<> mask(attention_.mask, tile, tile.first_row() + row, tile.first_key(), lane_);
      Words words[2] = {};  // of a box, and of the next
      if (has_words) mask.load(words[0], 0);
      Sums sums;
      Packed p;
      consumer.template multiply<Element, kKeyTile, tile::Major::kK, tile::Major::kK>(sums, qk_steps());
      const bool all_seen = tile.all_seen() && none_blind(lse2);
      const bool all_count = all_seen && attention_.mask.kind == MaskKind::kNone;
      const bool capped = attention_.softcap > 0, few_rules = rules_are_few(lse2, has_words);
      // Each path has its own copy of this, as what a path jumps over costs time.
      const auto finish_p_of_boxes = [&](const auto& to_exponents) {
        FFPA_UNROLL
        for (int box = 0; box < kBoxes; ++box) {
          const int fragment = box * kBoxFragments;
          auto& exponents = pairs_of<kBoxFragments>(sums, fragment);
          tile::PackedRows slopes = {};
          if (has_words && box + 1 < kBoxes) mask.load(words[(box + 1) % 2], fragment + kBoxFragments);
          to_exponents(exponents, words[box % 2], slopes);
          if (!all_seen) {
            hide_pairs(exponents, tile, tile.first_row() + row, tile.first_key() + fragment * 8, lse2, lane_);
          }
          tile::PackedRows& p_of_box = reinterpret_cast<tile::PackedRows&>(p[fragment * 2]);
          finish_p<Element>(exponents, p_of_box);
          store(arguments_.p, box, p_of_box);
          if (capped) apply_slopes<Element>(p_of_box, slopes, all_count);
        }
      };
      if (few_rules && !capped) {
        finish_p_of_boxes([&](auto& scores, const Words& of_box, tile::PackedRows&) {
          if (is_added(attention_.mask)) {  // scores are rounded before masks are added, as they may cancel each other
            for_each_score(scores, [&](float& score) { score = ptx::mul_rn(score, attention_.scale); });
            mask.add_to(scores, of_box);
            linear_exponents<Element>(scores, kLog2e, lse2);
          } else {
            linear_exponents<Element>(scores, attention_.score_factor, lse2);
            if (has_words) mask.add_to(scores, of_box);
          }
        });
      } else if (few_rules && are_small(pairs_of<kKeyTile / 8>(sums, 0), attention_.score_factor)) {
        finish_p_of_boxes([&](auto& scores, const Words& of_box, tile::PackedRows& slopes) {
          capped_exponents<Element>(scores, attention_, lse2, slopes);
          if (has_words) mask.add_to(scores, of_box);
        });
      } else {
        finish_p_by_rules(tile, row, all_seen, all_count, lse2, sums);
        FFPA_UNROLL
        for (int box = 0; box < kBoxes; ++box) {
          tile::PackedRows p_of_box;
          FFPA_UNROLL
          for (int i = 0; i < 4 * kBoxFragments; ++i) {
            const uint32_t packed = ptx::moved_bits(sums[0][box * 4 * kBoxFragments + i]);
            const int at = i / (4 * kPartFragments) * kPartPairs + i % kPartPairs;
            (i / kPartPairs % 2 == 0 ? p_of_box[at] : p[box * 2 * kBoxFragments + at]) = packed;
          }
          store(arguments_.p, box, p_of_box);
        }
      }
      consumer.template multiply<Element, kKeyTile, tile::Major::kK, tile::Major::kK>(sums, v_steps());
      FFPA_UNROLL
      for (int box = 0; box < kBoxes; ++box) {
        const int fragment = box * kBoxFragments;
        tile::PackedRows ds;
        finish_ds<Element>(pairs_of<kBoxFragments>(sums, fragment), p + fragment * 2, all_count, delta, ds);
        store(arguments_.ds, box, ds);
      }
    }
    stores.wait();
  }

  // Says whether no row is far, and the mask, if there is one, comes in words; beside a softcap it only hides pairs.
  FFPA_DEVICE bool rules_are_few(const float (&lse2)[2], bool has_words) const {
    const bool is_masked = attention_.mask.kind != MaskKind::kNone;
    const bool is_few = has_words && !(is_added(attention_.mask) && attention_.softcap > 0);
    return none_far(lse2) && (!is_masked || is_few);
  }

  // Turns raw products into P by all rules, packed. For each part of the fragments, P lies in the first half of the
  // part's registers, and P times its slopes in the second: what dS is a multiple of.
  FFPA_DEVICE void finish_p_by_rules(const KeptScoreTile& tile, int row, bool all_seen, bool all_count,
                                     const float (&lse2)[2], Sums& sums) const {
    tile::for_parts<4 * kPartFragments>(sums[0], [&](int part, float (&numbers)[4 * kPartFragments]) {
      uint32_t p[kPartPairs], slopes[kPartPairs] = {};
      auto& scores = reinterpret_cast<float (&)[1][kPartFragments][4]>(numbers);
      exponents_by_rules<Element>(
          scores, attention_, tile, all_seen, tile.first_row() + row, tile.first_key() + part * kPartFragments * 8,
          lse2, lane_, slopes,
          [&](RowShare(&shares)[2]) { load_shares(params_, tile, tile.first_row() + row, lane_, shares); });
      finish_p<Element>(scores, p);
      FFPA_UNROLL
      for (int i = 0; i < kPartPairs; ++i) numbers[i] = float_from_bits(p[i]);
      if (attention_.softcap > 0) apply_slopes<Element>(p, slopes, all_count);
      FFPA_UNROLL
      for (int i = 0; i < kPartPairs; ++i) numbers[kPartPairs + i] = float_from_bits(p[i]);
    });
  }

  // Returns kCount fragments of the sums, from `fragment` on.
  template <int kCount>
  static FFPA_DEVICE float (&pairs_of(Sums& sums, int fragment))[1][kCount][4] {
    return reinterpret_cast<float (&)[1][kCount][4]>(sums[0][fragment * 4]);
  }

  const Arguments& arguments_;
  const BackwardParams& params_;
  const AttentionParams& attention_;
  int lane_, warp_;
  Ring ring_;
  typename Config::Queue queue_;
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void backward_wgmma_scores(FFPA_GRID_CONSTANT const typename Config::Arguments arguments) {
  BackwardWgmmaScores<Config>(arguments).run();
}

}  // namespace ffpa
