// Attention forward for head dims whose O registers hold, on wgmma. A persistent block takes row tiles of kRows rows of
// one query head; two warpgroups have 64 of the rows each, and go over tiles of kKeys keys:
//
//   S of the next tile = Q Kᵀ, and O += P V of this one, are queued together; while the second runs, S becomes P
//
// P never leaves its thread's registers: accumulators of S, packed, are an A operand.
//
// One warp brings Q once, and K and V in parts of 64 keys, in the order in which they are used (tile/box_ring.cuh).
#pragma once

#include <cstdint>

#include "attention/attention_params.h"
#include "attention/head_rows.cuh"
#include "attention/item_queue.cuh"
#include "attention/row_state.cuh"
#include "attention/row_tiles.cuh"
#include "attention/score_rules.cuh"
#include "attention/tensor_maps.cuh"
#include "attention/visible_keys.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/launch_types.h"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "tile/box_ring.cuh"
#include "tile/fragments.cuh"
#include "tile/kept_value.cuh"

namespace ffpa {

// Fields: Dtype; kColumns of Q, K, V and O, at most.
template <class Fields>
struct ForwardFusedConfig : Fields {
  using Params = AttentionParams;
  static constexpr int kRows = tile::kConsumerGroups * tile::kBox;
  static constexpr int kKeys = Fields::kColumns <= 192 ? 128 : 64;  // of a tile: O leaves registers for so many
  static constexpr int kBoxes = Fields::kColumns / tile::kBox;      // of a row
  static constexpr int kPartBoxes = kBoxes <= 4 ? kBoxes : 1;       // of a slot: an instruction's width, or many slots
  static constexpr int kParts = kBoxes / kPartBoxes;
  static constexpr int kThreads = tile::kCoreThreads;
  static constexpr int kProducerRegisters = Fields::kColumns > 256 ? 24 : 40;  // of a thread
  static constexpr int kConsumerRegisters = Fields::kColumns > 256 ? 240 : 232;

  // Shared memory: slots of the ring, as many as fit; Q; for each warp rows of O on their way; barriers of the ring and
  // of Q; for each warp the rows in work; the block's row tiles.
  static constexpr int kConsumerWarps = tile::kConsumerGroups * tile::kGroupWarps;
  using Stores = tile::RowStores<1>;
  static constexpr uint32_t kQueryBytes = kRows * Fields::kColumns * 2;
  static constexpr uint32_t kOtherBytes = kQueryBytes + kConsumerWarps * Stores::kBytes + 2 * 8 +
                                          (1 + kConsumerWarps) * KeptRows::kBytes + ItemQueue::kBytes;
  static constexpr uint32_t kMostBytes = 227 * 1024, kSlotBytes = kPartBoxes * tile::kBoxBytes + 3 * 8;
  static constexpr int kSlots = min_of(int((kMostBytes - kOtherBytes - 16) / kSlotBytes), 16);
  using Ring = tile::BoxRing<0, kPartBoxes, kSlots>;

  static constexpr uint32_t kQueryAt = Ring::kBytes;
  static constexpr uint32_t kStoresAt = kQueryAt + kQueryBytes;
  static constexpr uint32_t kBarriersAt = kStoresAt + kConsumerWarps * Stores::kBytes;
  static constexpr uint32_t kQueryBarriersAt = kBarriersAt + Ring::kBarrierBytes;
  static constexpr uint32_t kKeptAt = round_up(kQueryBarriersAt + 2 * 8, 16u);
  static constexpr uint32_t kItemsAt = kKeptAt + (1 + kConsumerWarps) * KeptRows::kBytes;
  static constexpr uint32_t kSmemBytes = kItemsAt + ItemQueue::kBytes;
  static_assert(kSmemBytes <= kMostBytes, "what a block has");

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape;
    shape.grid.x = uint32_t(min_of(RowTiles(params, kRows).count(), params.resident_blocks));
    shape.threads = kThreads;
    shape.smem_bytes = kSmemBytes;
    shape.counter = reinterpret_cast<uint32_t*>(params.scratch);
    return shape;
  }

  struct Arguments {
    Params params;
    ptx::TensorMap q, k, v, out;
  };

  static LaunchStatus arguments(const Params& params, Arguments& arguments) {
    arguments.params = params;
    const LaunchStatus statuses[] = {map_queries(arguments.q, params, params.q, params.d_qk),
                                     map_keys(arguments.k, params, params.k, params.d_qk),
                                     map_keys(arguments.v, params, params.v, params.d_v),
                                     map_queries(arguments.out, params, params.out, params.d_v, Stores::kRows)};
    return first_failure(statuses);
  }
};

template <class Config>
class ForwardFused {
  using Element = typename Config::Dtype;
  using Ring = typename Config::Ring;
  using Arguments = typename Config::Arguments;
  static constexpr int kRows = Config::kRows;
  static constexpr int kKeys = Config::kKeys;
  static constexpr int kColumns = Config::kColumns;
  static constexpr int kKeySteps = kKeys / tile::kBox;
  static constexpr int kSlotsOfTile = kKeySteps * Config::kParts;  // of K, or of V
  static constexpr int kBoxFragments = tile::kBox / 8;
  using Scores = float[kKeySteps][1][kBoxFragments][4];
  using Probabilities = uint32_t[kKeys / 16][4];  // as A fragments
  using Out = float[kColumns / 2];

 public:
  FFPA_DEVICE explicit ForwardFused(const Arguments& arguments)
      : arguments_(arguments),
        params_(arguments.params),
        lane_(ptx::lane_id()),
        warp_(ptx::shfl_idx(ptx::thread_x() / 32, 0)),
        ring_{ptx::dynamic_smem(), ptx::dynamic_smem() + Config::kBarriersAt} {}

  FFPA_DEVICE void run() {
    if (ptx::thread_x() == 0) {
      ItemQueue(items_smem()).init(Config::kConsumerWarps);
      ptx::mbarrier_init(q_full(), 1);
      ptx::mbarrier_init(q_empty(), Config::kConsumerWarps);
      ring_.init();
    }
    ptx::sync_block();
    tile::run_roles<Config>(warp_, [&] { produce(); }, [&](int group, int warp) { consume(group, warp); });
  }

 private:
  FFPA_DEVICE int map_batch(const HeadRows& rows) const { return params_.is_packed() ? 0 : rows.batch(); }
  FFPA_DEVICE KeptRows kept_rows(int warp) const {
    return KeptRows(ring_.slots_smem + Config::kKeptAt + warp * KeptRows::kBytes);
  }
  FFPA_DEVICE uint32_t items_smem() const { return ring_.slots_smem + Config::kItemsAt; }
  FFPA_DEVICE uint32_t q_full() const { return ring_.slots_smem + Config::kQueryBarriersAt; }
  FFPA_DEVICE uint32_t q_empty() const { return q_full() + 8; }
  FFPA_DEVICE uint32_t q_box(int box, int group) const {
    return ring_.slots_smem + Config::kQueryAt + (box * tile::kConsumerGroups + group) * tile::kBoxBytes;
  }

  // ---- the producer's warp ----

  FFPA_DEVICE void produce() const {
    tile::BoxProducer<Ring> producer(ring_, lane_);
    const KeptRows kept = kept_rows(0);
    ItemQueue items(items_smem());
    uint32_t parity = 1;
    for_each_row_tile(
        params_, kRows, kept, lane_, [&] { return items.take(params_.scratch, lane_); },
        [&] {
          bring_queries(kept.get(), parity);
          parity ^= 1;
          const HeadRows rows = kept.get();
          const TileRange tiles = visible_tiles(rows, kKeys);
          const MapPlace place = {rows.entry.k.begin, rows.head() / params_.group, map_batch(rows)};
          const int n_k = rows.n_k();
          FFPA_NO_UNROLL
          for (int tile = tiles.first; tile <= tiles.end; ++tile) {
            if (tile < tiles.end) bring_tile(producer, arguments_.k, place, tile * kKeys, kLargestInt);
            if (tile > tiles.first) bring_tile(producer, arguments_.v, place, (tile - 1) * kKeys, n_k);
          }
        });
  }

  FFPA_DEVICE void bring_queries(const HeadRows& rows, uint32_t parity) const {
    const MapPlace place = {rows.entry.q.begin + rows.first, rows.head(), map_batch(rows)};
    if (ptx::elect_one()) {
      ptx::mbarrier_wait(q_empty(), parity);
      ptx::mbarrier_arrive_expect_tx(q_full(), Config::kQueryBytes);
      FFPA_NO_UNROLL
      for (int box = 0; box < Config::kBoxes; ++box) {
        for (int group = 0; group < tile::kConsumerGroups; ++group) {
          load_box(q_box(box, group), arguments_.q, q_full(), place, box * tile::kBox, group * tile::kBox);
        }
      }
    }
    ptx::sync_warp();
  }

  // A tile of K or V; rows from `end` on become zeros.
  FFPA_DEVICE void bring_tile(tile::BoxProducer<Ring>& producer, const ptx::TensorMap& map, const MapPlace& place,
                              int first_key, int end) const {
    FFPA_NO_UNROLL
    for (int step = 0; step < kKeySteps; ++step) {
      const int key = first_key + step * tile::kBox;
      FFPA_NO_UNROLL
      for (int part = 0; part < Config::kParts; ++part) {
        producer.bring_live_rows(
            live_box_rows(end - key, params_.is_packed()), [&](uint32_t boxes_smem, uint32_t barrier) {
              for (int box = 0; box < Config::kPartBoxes; ++box, boxes_smem += tile::kBoxBytes) {
                load_box(boxes_smem, map, barrier, place, (part * Config::kPartBoxes + box) * tile::kBox, key);
              }
            });
      }
    }
  }

  // ---- the warpgroups that multiply ----

  FFPA_DEVICE void consume(int group, int group_warp) {
    const int warp = group * tile::kGroupWarps + group_warp, row = warp * 16;  // of the warp, in the tile
    typename Config::Stores stores(ring_.slots_smem + Config::kStoresAt + warp * Config::Stores::kBytes, lane_);
    const KeptRows kept = kept_rows(1 + warp);
    ItemQueue items(items_smem());
    uint32_t parity = 0;
    for_each_row_tile(
        params_, kRows, kept, lane_, [&] { return items.get(lane_); },
        [&] {
          RowState state;
          Out out;
          ptx::mbarrier_wait(q_full(), parity);
          parity ^= 1;
          const TileRange tiles = visible_tiles(kept.get(), kKeys);
          if (tiles.first < tiles.end) {
            Scores scores;
            Probabilities p;
            queue_scores(scores, group);
            ptx::wgmma_wait_group<0>();
            release();
            to_probabilities(scores, kept.get(), tiles.first * kKeys, row, state);
            pack(p, scores);
            FFPA_NO_UNROLL
            for (int tile = tiles.first + 1; tile < tiles.end; ++tile) {
              queue_scores(scores, group);
              queue_product(out, p, tile > tiles.first + 1);
              ptx::wgmma_wait_group<1>();
              release();
              const float before[2] = {state.reference[0], state.reference[1]};
              const bool moved = to_probabilities(scores, kept.get(), tile * kKeys, row, state);
              ptx::wgmma_wait_group<0>();
              release();
              if (moved) {
                const float factor[2] = {growth(before[0], state.reference[0]), growth(before[1], state.reference[1])};
                FFPA_UNROLL
                for (int i = 0; i < kColumns / 2; ++i) out[i] *= factor[i / 2 % 2];
              }
              pack(p, scores);
            }
            ptx::sync_warp();
            if (lane_ == 0) ptx::mbarrier_arrive(q_empty());
            queue_product(out, p, tiles.end > tiles.first + 1);
            ptx::wgmma_wait_group<0>();
            release();
          } else {
            ptx::sync_warp();
            if (lane_ == 0) ptx::mbarrier_arrive(q_empty());
            FFPA_UNROLL
            for (int i = 0; i < kColumns / 2; ++i) out[i] = 0;
          }
          finish(out, stores, kept.get(), row, state);
        });
    stores.wait();
  }

  // scores = Q Kᵀ of the next tile, a group of its own.
  FFPA_DEVICE void queue_scores(Scores& scores, int group) {
    FFPA_UNROLL
    for (int step = 0; step < kKeySteps; ++step) {
      FFPA_UNROLL
      for (int part = 0; part < Config::kParts; ++part) {
        const uint64_t k = next_slot();
        ptx::wgmma_fence();
        FFPA_UNROLL
        for (int box = 0; box < Config::kPartBoxes; ++box) {
          const uint64_t q = descriptor(q_box(part * Config::kPartBoxes + box, group));
          FFPA_UNROLL
          for (int depth = 0; depth < tile::kBox / 16; ++depth) {
            using Sums = float[tile::kBox / 2];
            ptx::wgmma_ss<Element, tile::kBox>(reinterpret_cast<Sums&>(scores[step]), q + depth * 2,
                                               k + (box * tile::kBoxBytes + depth * 32) / 16, part + box + depth > 0);
          }
        }
      }
    }
    ptx::wgmma_commit_group();
  }

  // out += P V of a tile, a group of its own.
  FFPA_DEVICE void queue_product(Out& out, const Probabilities& p, bool accumulate) {
    FFPA_UNROLL
    for (int step = 0; step < kKeySteps; ++step) {
      FFPA_UNROLL
      for (int part = 0; part < Config::kParts; ++part) {
        constexpr int kPartColumns = Config::kPartBoxes * tile::kBox;
        using Sums = float[kPartColumns / 2];
        const uint64_t v = next_slot();
        ptx::wgmma_fence();
        FFPA_UNROLL
        for (int depth = 0; depth < tile::kBox / 16; ++depth) {
          ptx::wgmma_rs<Element, kPartColumns, tile::Major::kMN>(
              reinterpret_cast<Sums&>(out[part * kPartColumns / 2]), p[step * 4 + depth],
              v + depth * 2 * tile::kAtomBytes / 16, accumulate || step + depth > 0);
        }
      }
    }
    ptx::wgmma_commit_group();
  }

  // The descriptor of the next slot, once it has landed.
  FFPA_DEVICE uint64_t next_slot() {
    ptx::mbarrier_wait(ring_.full(at_.slot), at_.parity);
    const uint64_t boxes = descriptor(ring_.slot(at_.slot));
    at_.advance();
    return boxes;
  }

  // Gives back the slots of a tile of K or V, in the order in which they were used.
  FFPA_DEVICE void release() {
    ptx::sync_warp();
    FFPA_UNROLL
    for (int i = 0; i < kSlotsOfTile; ++i) {
      if (lane_ == 0) ptx::mbarrier_arrive(ring_.empty(released_.slot));
      released_.advance();
    }
  }

  static FFPA_DEVICE uint64_t descriptor(uint32_t boxes_smem) {
    return ptx::wgmma_descriptor(boxes_smem, tile::kBoxBytes, tile::kAtomBytes, Swizzle::k128Bytes);
  }

  // ---- P of a tile ----

  // Makes P of raw scores; says whether O has another reference.
  FFPA_DEVICE bool to_probabilities(Scores& scores, const HeadRows& rows, int key, int row, RowState& state) const {
    const bool all_seen = all_rows_see(rows, key, kKeys);
    const bool plain =
        all_seen && params_.softcap == 0 && params_.mask.kind == MaskKind::kNone && params_.score_factor > 0;
    if (!plain) {
      FFPA_UNROLL
      for (int step = 0; step < kKeySteps; ++step) {
        scores_to_logits(scores[step], params_, rows, all_seen, rows.first + row, key + step * tile::kBox, lane_);
      }
    }
    const float factor = plain ? params_.score_factor : 1.0f;
    bool moved = false;
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      float maximum = -kInfinity;
      for_each_of_row(scores, h, [&](float& score) { maximum = larger_of(maximum, score); });
      maximum = larger_of(maximum, ptx::shfl_xor(maximum, 1));
      maximum = larger_of(maximum, ptx::shfl_xor(maximum, 2));
      moved |= state.follow(h, maximum * factor);
      const float reference = finite_reference(state.reference[h]);
      float sum = 0;
      for_each_of_row(scores, h, [&](float& score) {
        score = ptx::ex2(score * factor - reference);
        sum += score;
      });
      state.sum[h] += sum;
    }
    return moved;
  }

  template <class Function>
  static FFPA_DEVICE void for_each_of_row(Scores& scores, int h, const Function& function) {
    FFPA_UNROLL
    for (int step = 0; step < kKeySteps; ++step) {
      FFPA_UNROLL
      for (int n = 0; n < kBoxFragments; ++n) {
        function(scores[step][0][n][2 * h]);
        function(scores[step][0][n][2 * h + 1]);
      }
    }
  }

  static FFPA_DEVICE void pack(Probabilities& p, const Scores& scores) {
    FFPA_UNROLL
    for (int i = 0; i < kKeys / 16; ++i) {
      FFPA_UNROLL
      for (int j = 0; j < 4; ++j) {
        const float (&fragment)[4] = scores[i / 4][0][i % 4 * 2 + j / 2];
        p[i][j] = ptx::pack<Element>(fragment[j % 2 * 2], fragment[j % 2 * 2 + 1]);
      }
    }
  }

  // ---- O ----

  FFPA_DEVICE void finish(const Out& out, typename Config::Stores& stores, const HeadRows& rows, int row,
                          RowState& state) const {
    finish_rows(params_, rows, row, state, lane_);
    const int first = rows.first + row;
    if (rows.last + 1 - first >= Config::Stores::kRows) {
      const MapPlace place = {rows.entry.q.begin, rows.head(), map_batch(rows)};
      store_rows<Element>(stores, out, state.sum, arguments_.out, place, 0, first);
      return;
    }
    auto writer = out_writer<Element, kColumns / 8>(params_, rows, row, 0, lane_);
    FFPA_UNROLL
    for (int n = 0; n < kColumns / 8; ++n) {
      const float values[4] = {out[4 * n] * state.sum[0], out[4 * n + 1] * state.sum[0], out[4 * n + 2] * state.sum[1],
                               out[4 * n + 3] * state.sum[1]};
      writer.put(n, values);
    }
  }

  const Arguments& arguments_;
  const AttentionParams& params_;
  int lane_, warp_;
  Ring ring_;
  tile::RingPosition<Ring> at_, released_;
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void forward_fused(FFPA_GRID_CONSTANT const typename Config::Arguments arguments) {
  ForwardFused<Config>(arguments).run();
}

}  // namespace ffpa
