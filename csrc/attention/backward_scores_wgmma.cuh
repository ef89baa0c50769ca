// P and dS of the backward on wgmma: tiles of kRowTile rows × kKeyTile keys, into the workspace. For each tile, of 64
// rows a warpgroup:
//
//   1. dP = dO Vᵀ          over d_v, in steps of 64
//   2. X = dP - δ          packed to 16 bits, beside the accumulators
//   3. S = Q Kᵀ            over d_qk, in the same accumulators
//   4. P = exp2(S - LSE), dS = P ∘ X, 64 keys at a time: to shared memory, from there by TMA to the workspace
//
// dP comes first since X takes half of its registers, and then P and dS are finished together (with a softcap, dS also
// needs the scores). The producer is a tile ahead as far as the ring reaches. In step 4 the staging boxes of a
// warpgroup are its own: its warps meet at a named barrier before they write (the copies of the last 64 keys have read
// them) and before one thread starts the copies (all have written).
#pragma once

#include <cstdint>

#include "attention/backward_pairs.cuh"
#include "attention/backward_params.h"
#include "attention/backward_tiles.cuh"
#include "attention/score_tile_queue.cuh"
#include "attention/tensor_maps.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/launch_types.h"
#include "ptx/special_registers.cuh"
#include "ptx/warp.cuh"
#include "tile/box_ring.cuh"

namespace ffpa {

// Fields: Dtype.
template <class Fields>
struct BackwardScoresWgmmaConfig : Fields {
  using Params = BackwardParams;
  using Ring = tile::BoxRing<kScoreRows / tile::kBox, kKeyTile / tile::kBox, 4>;
  static constexpr int kThreads = tile::kCoreThreads;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // of a thread

  // Shared memory: slots of the ring; for each warpgroup a box of P and one of dS; barriers; tiles.
  static constexpr uint32_t kStagingBytes = 2 * tile::kBoxBytes;
  static constexpr uint32_t kSmemBytes =
      Ring::kBytes + tile::kConsumerGroups * kStagingBytes + Ring::kBarrierBytes + ScoreTileQueue::kBytes;

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape;
    shape.grid.x = uint32_t(min_of(score_tiles(params), params.attention.resident_blocks));
    shape.threads = kThreads;
    shape.smem_bytes = kSmemBytes;
    return shape;
  }

  struct Arguments {
    Params params;
    ptx::TensorMap q, k, v, grad_out, p, ds;
  };

  static LaunchStatus arguments(const Params& params, Arguments& arguments) {
    const AttentionParams& a = params.attention;
    arguments.params = params;
    const LaunchStatus statuses[] = {
        map_queries(arguments.q, a, a.q, a.d_qk),
        map_keys(arguments.k, a, a.k, a.d_qk),
        map_keys(arguments.v, a, a.v, a.d_v),
        map_queries(arguments.grad_out, a, params.grad_out, a.d_v),
        map_matrix(arguments.p, params.p, params.keys_of_chunk(), params.workspace_rows()),
        map_matrix(arguments.ds, params.ds, params.keys_of_chunk(), params.workspace_rows())};
    return first_failure(statuses);
  }
};

template <class Config>
class BackwardScoresWgmma {
  using Element = typename Config::Dtype;
  using Ring = typename Config::Ring;
  using Arguments = typename Config::Arguments;

  static constexpr int kFragments = kKeyTile / 8;       // of a row of a tile
  static constexpr int kBoxFragments = tile::kBox / 8;  // and of a box
  static constexpr int kPartFragments = kBoxFragments / 2;
  static constexpr int kBoxes = kKeyTile / tile::kBox;
  using Sums = float[1][kKeyTile / 2];
  using Packed = uint32_t[kKeyTile / 4];  // [fragment][half of rows], a pair of keys each
  using PackedBox = uint32_t[kBoxFragments * 2];

 public:
  FFPA_DEVICE explicit BackwardScoresWgmma(const Arguments& arguments)
      : arguments_(arguments),
        params_(arguments.params),
        attention_(arguments.params.attention),
        lane_(ptx::lane_id()),
        warp_(ptx::shfl_idx(ptx::thread_x() / 32, 0)),  // which the compiler then knows to be the warp's
        ring_{ptx::dynamic_smem(), ptx::dynamic_smem() + Ring::kBytes + tile::kConsumerGroups * Config::kStagingBytes},
        queue_(ring_.barriers_smem + Ring::kBarrierBytes) {}

  FFPA_DEVICE void run() {
    if (ptx::thread_x() == 0) {
      queue_.init(tile::kConsumerGroups * tile::kGroupWarps);
      ring_.init();
    }
    ptx::sync_block();
    tile::run_roles<Config>(warp_, [&] { produce(); }, [&](int group, int warp) { consume(group, warp); });
  }

 private:
  FFPA_DEVICE int qk_steps() const { return ceil_div(attention_.d_qk, tile::kBox); }
  FFPA_DEVICE int v_steps() const { return ceil_div(attention_.d_v, tile::kBox); }

  // ---- the producer's warp ----

  FFPA_DEVICE void produce() {
    tile::BoxProducer<Ring> producer(ring_, lane_);
    ScoreTileSequence tiles(params_);
    ScoreTile tile;
    FFPA_NO_UNROLL
    while (tiles.next(tile)) {
      if (lane_ == 0) queue_.put(&tile);
      if (!tile.is_computed) continue;
      const HeadRows& rows = tile.rows;
      const int batch = attention_.is_packed() ? 0 : rows.batch();
      const MapPlace q = {rows.entry.q.begin + rows.first, rows.head(), batch};
      const MapPlace k = {rows.entry.k.begin + tile.first_key, tile.head_kv, batch};
      const auto bring = [&](const ptx::TensorMap& a, const ptx::TensorMap& b, int steps) {
        FFPA_NO_UNROLL
        for (int step = 0; step < steps; ++step) {
          producer.bring([&](uint32_t boxes_smem, uint32_t barrier) {
            const int column = step * tile::kBox;
            for (int box = 0; box < Ring::kBoxesA; ++box, boxes_smem += tile::kBoxBytes) {
              load_box(boxes_smem, a, barrier, q, column, box * tile::kBox);
            }
            for (int box = 0; box < Ring::kBoxesB; ++box, boxes_smem += tile::kBoxBytes) {
              load_box(boxes_smem, b, barrier, k, column, box * tile::kBox);
            }
          });
        }
      };
      bring(arguments_.grad_out, arguments_.v, v_steps());
      bring(arguments_.q, arguments_.k, qk_steps());
    }
    if (lane_ == 0) queue_.put(nullptr);
  }

  // ---- the warpgroups that multiply ----

  FFPA_DEVICE void consume(int group, int group_warp) {
    tile::BoxConsumer<Ring> consumer(ring_, group, lane_);
    const uint32_t staging_smem = ring_.slots_smem + Ring::kBytes + group * Config::kStagingBytes;
    const bool stores = group_warp == 0 && lane_ == 0;
    const int row = group * tile::kBox + group_warp * 16;  // of the warp, in a tile
    FFPA_NO_UNROLL
    for (;; queue_.release(lane_)) {
      const KeptScoreTile tile = queue_.get();
      if (!tile.exists()) break;
      const auto store_box = [&](int box, const PackedBox& p, const PackedBox& ds) {
        if (stores) ptx::bulk_wait_group_read<0>();
        ptx::bar_sync(1 + group, tile::kGroupThreads);
        tile::stage_rows(staging_smem, group_warp * 16, p, lane_);
        tile::stage_rows(staging_smem + tile::kBoxBytes, group_warp * 16, ds, lane_);
        ptx::fence_proxy_async();
        ptx::bar_sync(1 + group, tile::kGroupThreads);
        const int key = tile.first_key() - params_.first_key + box * tile::kBox;
        const int to_row = tile.workspace_row() + group * tile::kBox;
        if (stores) {
          ptx::tma_store_2d(&arguments_.p, staging_smem, key, to_row);
          ptx::tma_store_2d(&arguments_.ds, staging_smem + tile::kBoxBytes, key, to_row);
          ptx::bulk_commit_group();
        }
      };
      if (!tile.is_computed()) {
        const PackedBox zeros = {};
        FFPA_NO_UNROLL
        for (int box = 0; box < kBoxes; ++box) store_box(box, zeros, zeros);
        continue;
      }
      float lse2[2], delta[2];
      load_statistics(params_, tile, tile.first_row() + row, lane_, lse2, delta);

      Sums sums;
      consumer.template multiply<Element, kKeyTile, tile::Major::kK, tile::Major::kK>(sums, v_steps());
      Packed x;
      FFPA_UNROLL
      for (int i = 0; i < kFragments * 2; ++i) {
        x[i] = ptx::pack<Element>(sums[0][2 * i] - delta[i % 2], sums[0][2 * i + 1] - delta[i % 2]);
      }
      consumer.template multiply<Element, kKeyTile, tile::Major::kK, tile::Major::kK>(sums, qk_steps());

      const bool all_seen = tile.all_seen();
      const bool plain = all_seen && attention_.mask.kind == MaskKind::kNone && !(attention_.softcap > 0);
      FFPA_UNROLL
      for (int box = 0; box < kBoxes; ++box) {
        PackedBox p, ds;
        if (plain) {
          float scores[1][kBoxFragments][4];
          get_scores(scores, sums[0], box * kBoxFragments);
          finish_plain_pairs<Element>(scores, x + box * kBoxFragments * 2, attention_.score_factor, lse2, p, ds);
        } else {
          FFPA_UNROLL
          for (int half = 0; half < 2; ++half) {  // fewer at a time, as registers are scarce
            const int fragment = (2 * box + half) * kPartFragments;
            float scores[1][kPartFragments][4];
            get_scores(scores, sums[0], fragment);
            finish_pairs<Element>(scores, x + fragment * 2, attention_, tile, all_seen, tile.first_row() + row,
                                  tile.first_key() + fragment * 8, lse2, lane_, p + half * kPartFragments * 2,
                                  ds + half * kPartFragments * 2);
          }
        }
        store_box(box, p, ds);
      }
    }
    if (stores) ptx::bulk_wait_group<0>();
  }

  template <int kCount>
  static FFPA_DEVICE void get_scores(float (&scores)[1][kCount][4], const float (&sums)[kKeyTile / 2], int fragment) {
    FFPA_UNROLL
    for (int n = 0; n < kCount; ++n) {
      FFPA_UNROLL
      for (int e = 0; e < 4; ++e) scores[0][n][e] = sums[(fragment + n) * 4 + e];
    }
  }

  const Arguments& arguments_;
  const BackwardParams& params_;
  const AttentionParams& attention_;
  int lane_, warp_;
  Ring ring_;
  ScoreTileQueue queue_;
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void backward_scores_wgmma(FFPA_GRID_CONSTANT const typename Config::Arguments arguments) {
  BackwardScoresWgmma<Config>(arguments).run();
}

}  // namespace ffpa
