// Attention forward on wgmma where V is the first columns of K, in one storage: the latent vectors of MLA. Each is read
// once. A persistent block takes row tiles of 64 rows, each with all keys that it sees or a part of them. Keys come in
// tiles of 64, from the first one that the rows see on, and the two warpgroups take these in turn:
//
//   the warpgroup of the tile computes S = Q Kᵀ for all rows, and makes P of it; then both multiply P with the tile,
//   each with the half of V's columns that it has in O: the first from registers, the other from shared memory
//
// Meanwhile the other warpgroup computes S of the next tile: one multiplies while the other has a softmax.
//
// A message with P has the references (softmax.cuh) of its rows. The softmax of the next tile begins with these, so
// references only grow from tile to tile, and O follows those of the P that it adds.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/forward/wgmma_block.cuh"
#include "attention/forward/wgmma_steps.cuh"
#include "attention/key_boxes.cuh"
#include "attention/params/attention_params.h"
#include "attention/rows/item_queue.cuh"
#include "attention/rows/row_tile.cuh"
#include "attention/rows/row_tiles.cuh"
#include "attention/softmax.cuh"
#include "attention/tensor_maps.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/box_ring.cuh"
#include "tile/fragments.cuh"
#include "tile/smem_layout.cuh"
#include "tile/smem_plan.cuh"

namespace ffpa {

// Fields has Dtype; kColumns, the most columns of Q and K, of which O has the first 512 at most; kPaged, whether keys
// lie in pages.
template <class Fields>
struct ForwardWgmmaLatentConfig : Fields {
  using Params = AttentionParams;
  static constexpr int kRows = tile::kBox;
  static constexpr int kTileKeys = tile::kBox, kKeys = tile::kConsumerGroups * kTileKeys;  // a tile a warpgroup
  static constexpr int kBoxes = Fields::kColumns / tile::kBox;                             // boxes of a row of K
  static constexpr int kOwnColumns = 256, kOwnBoxes = kOwnColumns / tile::kBox;            // O of a warpgroup
  static constexpr int kValueBoxes = tile::kConsumerGroups * kOwnBoxes;
  static constexpr bool kHasTail = kBoxes > kValueBoxes;  // a box of K that V has not
  static_assert(kBoxes == kValueBoxes + kHasTail, "V has 512 columns, and K 64 more at most");
  static constexpr int kProducers = kProducersOfKeys<Fields::kPaged>;
  static constexpr int kFirstStep = Fields::kPaged ? tile::kBox : 1;  // tiles begin at a multiple of it
  static constexpr int kThreads = tile::kCoreThreads;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // registers of a thread

  // A slot has the columns of V that a warpgroup has in O, which gives them back; or the tail.
  using Ring = tile::BoxRing<0, kOwnBoxes, 2 * tile::kConsumerGroups, 1, 1>;
  using Tails = tile::BoxRing<0, 1, tile::kConsumerGroups, 1, 1>;
  using Queries = QueryBoxes<kBoxes, 1>;
  using Items = ItemQueue<>;
  using Stores = tile::RowStores<1>;
  static_assert(tile::kConsumerWarps * Stores::kBytes <= Tails::kBytes, "rows on their way lie in place of tails");
  static constexpr uint32_t kWarpPBytes = 16 * tile::kBoxRowBytes, kNoteBytes = kRows * 4;
  struct Smem {
    tile::SmemSlots<Ring> slots;
    tile::SmemBytes<Tails::kBytes, 1024> tails;  // or, where there are none, rows of O on their way
    tile::SmemBytes<Queries::kBytes, 1024> q;
    tile::SmemBytes<tile::kGroupWarps * kWarpPBytes, 1024> p;  // P of one tile, for the other warpgroup
    tile::SmemBytes<kNoteBytes> notes[tile::kConsumerGroups], sums[tile::kConsumerGroups];  // of a warpgroup's rows
    tile::SmemBarriers<Ring::kBarrierBytes> ring_barriers;
    tile::SmemBarriers<Tails::kBarrierBytes> tail_barriers;
    tile::SmemBarriers<Queries::kBarrierBytes> q_barriers;
    tile::SmemBarriers<tile::kConsumerGroups * 8> message_barriers;
    tile::SmemBytes<KeptRows::kBytes> kept[kProducers + tile::kConsumerWarps];
    tile::SmemBytes<Items::kBytes> items;
  };
  static_assert(sizeof(Smem) <= tile::kMostSmemBytes, "a block has that much");

  static LaunchShape launch_shape(const Params& params) {
    return persistent_shape(RowTiles<kRows>(params).count(), params.resident_blocks, kThreads, sizeof(Smem),
                            reinterpret_cast<uint32_t*>(params.scratch));
  }

  struct Arguments {
    AttentionParams params;
    RowTiles<kRows, Fields::kPaged> row_tiles;
    KeyPages pages;
    ptx::TensorMap q, k, out;

    LaunchStatus fill(const AttentionParams& of_call) {
      params = of_call;
      row_tiles = RowTiles<kRows, Fields::kPaged>(params);
      pages = KeyPages(params);
      const LaunchStatus statuses[] = {
          map_row_tiles(q, params, params.q, params.d_qk, kRows),
          Fields::kPaged ? map_pages(k, params, params.k, params.d_qk) : map_keys(k, params, params.k, params.d_qk),
          map_row_tiles(out, params, params.out, params.d_v, tile::kStoredRows)};
      return first_failure(statuses);
    }
  };
};

template <class Config>
class ForwardWgmmaLatent : WgmmaBlock<Config> {
  using Base = WgmmaBlock<Config>;
  using Base::arguments_, Base::params_, Base::lane_, Base::warp_, Base::smem_;
  using Base::ring, Base::kept_rows, Base::item_queue, Base::queries, Base::take_item, Base::bring_row_tiles;
  using Element = typename Config::Dtype;
  using Ring = typename Config::Ring;
  using Tails = typename Config::Tails;
  using Smem = typename Config::Smem;
  static constexpr int kKeys = Config::kKeys;
  static constexpr int kOwnColumns = Config::kOwnColumns;
  using Scores = ScoreSums<1>;
  using Probabilities = PackedProbabilities<1>;
  using Out = float[kOwnColumns / 2];

 public:
  FFPA_DEVICE explicit ForwardWgmmaLatent(const typename Config::Arguments& arguments)
      : Base(arguments, arguments.params) {}

  FFPA_DEVICE void run() {
    Base::begin([&] {
      item_queue().init(tile::kConsumerWarps + Config::kProducers - 1);
      queries().init();
      for (int group = 0; group < tile::kConsumerGroups; ++group) {
        ptx::mbarrier_init(message(group), tile::kGroupWarps);
      }
      ring().init(Config::kProducers);
      tails().init(Config::kProducers);
    });
    ptx::sync_block();
    Base::run_roles([&](int producer) { produce(producer); }, [&](int group, int warp) { consume(group, warp); });
  }

 private:
  FFPA_DEVICE Tails tails() const {
    return {smem_ + uint32_t(offsetof(Smem, tails)), smem_ + uint32_t(offsetof(Smem, tail_barriers))};
  }

  // Returns the barrier that says that P of the warpgroup's tile is there.
  FFPA_DEVICE uint32_t message(int group) const { return smem_ + offsetof(Smem, message_barriers) + group * 8; }

  // ---- the warps that produce ----

  FFPA_DEVICE void produce(int warp) const {
    tile::BoxProducer<Ring, Config::kProducers> producer(ring(), lane_, warp);
    tile::BoxProducer<Tails, Config::kProducers> tail_producer(tails(), lane_, warp);
    auto items = item_queue();
    const auto has_keys = [&](const SharedRowTile& rows) {
      return !visible_part_from_first<Config::kFirstStep>(rows, kKeys, params_).is_empty();
    };
    bring_row_tiles(
        warp, [&] { return warp > 0 ? items.get(lane_) : take_item(items, params_.scratch, has_keys); },
        [&](const SharedRowTile& rows, auto& keys) {
          const Run part = visible_part_from_first<Config::kFirstStep>(rows, kKeys, params_);
          const int n_k = rows.n_k();
          FFPA_NO_UNROLL
          for (int key = part.begin; key < part.end; key += Config::kTileKeys) {
            const uint64_t live = keys.live_rows(key, n_k);  // keys that do not exist become zeros
            const auto runs = keys.find(key);
            if constexpr (Config::kHasTail) {
              tail_producer.bring_live_rows(live, keys.keys(arguments_.k, Config::kValueBoxes * tile::kBox, 1, runs),
                                            1);
            }
            FFPA_NO_UNROLL
            for (int group = 0; group < tile::kConsumerGroups; ++group) {
              producer.bring_live_rows(live, keys.keys(arguments_.k, group * kOwnColumns, Config::kOwnBoxes, runs));
            }
          }
        });
  }

  // ---- the warpgroups that multiply ----

  FFPA_DEVICE void consume(int group, int group_warp) {
    const int warp = group * tile::kGroupWarps + group_warp;
    const KeptRows kept = kept_rows(Config::kProducers + warp);
    const int row = group_warp * 16;  // first row of the warp in the tile
    auto items = item_queue();
    typename Config::Stores stores(smem_ + offsetof(Smem, tails) + warp * Config::Stores::kBytes, lane_);
    uint32_t parity = 0;
    for_each_row_tile(
        params_, arguments_.row_tiles, kept, lane_, [&] { return items.get(lane_); },
        [&] {
          RowState state;
          Out out;
          float of_out[2] = {-kInfinity, -kInfinity};  // references of O
          FFPA_UNROLL
          for (float& sum : out) sum = 0;
          float sinks[2];  // loaded long before they are used
          for_each_half(lane_, [&](int h, int r) { sinks[h] = sink_of(params_, kept.get(), row + r); });
          ptx::mbarrier_wait(queries().full(), parity);
          parity ^= 1;
          const Run keys = visible_part_from_first<Config::kFirstStep>(kept.get(), kKeys, params_);
          if (keys.begin < keys.end) {
            Scores scores;
            int key = keys.begin + group * Config::kTileKeys;  // first key of the warpgroup's tile
            if (group == 0) {                                  // nothing comes before the first tile
              begin_scores(scores, group);
              finish_scores(scores, group);
              to_probabilities<kRulesOf<Config::kPaged>>(scores, params_, kept, key, row, state, lane_);
              add_own_product(out, of_out, scores, state, group, row);
              key += kKeys;
            }
            FFPA_NO_UNROLL
            for (; key < keys.end; key += kKeys) {
              receive(out, of_out, state, group, row);
              queue_their_product(out, group);
              begin_scores(scores, group);
              ptx::wgmma_wait_group<1>();  // before the tensor cores have so much to do that the warp waits for them
              end_their_product(group);
              finish_scores(scores, group);
              to_probabilities<kRulesOf<Config::kPaged>>(scores, params_, kept, key, row, state, lane_);
              add_own_product(out, of_out, scores, state, group, row);
            }
            queries().release(lane_);
            if (group == 0) {
              receive(out, of_out, state, group, row);
              queue_their_product(out, group);
              ptx::wgmma_wait_group<0>();
              end_their_product(group);
            }
            add_sums_of_groups(state, group, row);
          } else {
            queries().release(lane_);
          }
          const SharedRowTile rows = kept.get();
          tell_if_asked(state, params_, rows, row);
          for_each_half(lane_, [&](int h, int r) {
            const bool writes = group == 0 && lane_ % 4 == 0;
            state.sum[h] = finish_row(params_, rows, row + r, sinks[h], state.reference[h], state.sum[h], writes);
          });
          if (params_.splits > 1 && keys.begin == keys.end) return;  // nobody reads O of a part without keys
          const int column = group * kOwnColumns;
          if constexpr (Config::kHasTail) {
            write_rows<Element>(out, params_, rows, row, column, state.sum, lane_);
          } else {
            write_out<Element>(out, stores, arguments_.out, params_, rows, row, column, state.sum, lane_);
          }
        });
    stores.wait();
  }

  // ---- products, and the slots that they read ----

  // Returns the slot of a tile of one warpgroup with the columns of V that another one has in O.
  static FFPA_DEVICE int slot_of(int tile_group, int group) { return tile::kConsumerGroups * tile_group + group; }

  FFPA_DEVICE void give_back(uint32_t empty) const {
    ptx::sync_warp();
    if (lane_ == 0) ptx::mbarrier_arrive(empty);
  }

  // Queues the first part of scores = Q Kᵀ of the warpgroup's next tile: over the tail, or else over half of V's
  // columns.
  FFPA_DEVICE void begin_scores(Scores& scores, int group) const {
    if constexpr (Config::kHasTail) {
      ptx::mbarrier_wait(tails().full(group), tiles_ & 1);
      const uint64_t k = tile::boxes_descriptor(tails().slot(group));
      ptx::wgmma_fence();
      add_scores<Element>(scores[0], queries(), Config::kValueBoxes, 1, 0, k, false);
    } else {
      add_half(scores, 0, group, false);
    }
    ptx::wgmma_commit_group();
  }

  FFPA_DEVICE void finish_scores(Scores& scores, int group) const {
    if constexpr (Config::kHasTail) add_half(scores, 0, group, true);
    add_half(scores, 1, group, true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    if constexpr (Config::kHasTail) give_back(tails().empty(group));
  }

  // Queues scores += Q Kᵀ over the columns that one warpgroup has in O; or begins the sums.
  FFPA_DEVICE void add_half(Scores& scores, int half, int group, bool accumulate) const {
    const int slot = slot_of(group, half);
    ptx::mbarrier_wait(ring().full(slot), tiles_ & 1);
    const uint64_t k = tile::boxes_descriptor(ring().slot(slot));
    ptx::wgmma_fence();
    add_scores<Element>(scores[0], queries(), half * Config::kOwnBoxes, Config::kOwnBoxes, 0, k, accumulate);
  }

  // Packs P, and computes out += P V of the warpgroup's own tile; sends P to the other warpgroup meanwhile. A slot
  // with V goes back through the warpgroup that has its columns in O, after the product with it.
  FFPA_DEVICE void add_own_product(Out& out, float (&of_out)[2], const Scores& scores, const RowState& state, int group,
                                   int row) {
    Probabilities p;
    pack_probabilities<Element>(p, scores);
    follow(out, of_out, state.reference);
    const int slot = slot_of(group, group);
    const uint64_t v = tile::boxes_descriptor(ring().slot(slot));
    ptx::wgmma_fence();
    FFPA_UNROLL
    for (int step = 0; step < tile::kBox / 16; ++step) {
      ptx::wgmma_rs<Element, kOwnColumns, tile::Major::kMN>(out, p[step], v + step * 2 * tile::kAtomBytes / 16, true);
    }
    ptx::wgmma_commit_group();
    send(p, state, group, row);
    ptx::wgmma_wait_group<0>();
    give_back(ring().empty(slot));
    ++tiles_;
  }

  // Queues out += P V of the other warpgroup's tile.
  FFPA_DEVICE void queue_their_product(Out& out, int group) const {
    const int slot = slot_of(1 - group, group);
    const uint64_t p = tile::boxes_descriptor(smem_ + offsetof(Smem, p));
    const uint64_t v = tile::boxes_descriptor(ring().slot(slot));
    ptx::mbarrier_wait(ring().full(slot), messages_ & 1);  // V is there, as P is: the wait shows it
    ptx::wgmma_fence();
    FFPA_UNROLL
    for (int step = 0; step < tile::kBox / 16; ++step) {
      ptx::wgmma_ss<Element, kOwnColumns, tile::Major::kK, tile::Major::kMN>(
          out, p + step * 2, v + step * 2 * tile::kAtomBytes / 16, true);
    }
    ptx::wgmma_commit_group();
  }

  FFPA_DEVICE void end_their_product(int group) {
    give_back(ring().empty(slot_of(1 - group, group)));
    ++messages_;
  }

  // ---- messages between the warpgroups, which take turns: one P is read before the next is written ----

  FFPA_DEVICE uint32_t note(int group, int row) const {
    return smem_ + offsetof(Smem, notes) + group * Config::kNoteBytes + row * 4;
  }
  FFPA_DEVICE uint32_t sum(int group, int row) const {
    return smem_ + offsetof(Smem, sums) + group * Config::kNoteBytes + row * 4;
  }

  FFPA_DEVICE void send(const Probabilities& p, const RowState& state, int group, int row) const {
    constexpr tile::RowLayout kLayout(tile::kBoxRowBytes);
    ptx::bar_sync(1 + group, tile::kGroupThreads);  // the warpgroup's product with the P that lies there is done
    FFPA_UNROLL
    for (int i = 0; i < tile::kBox / 16; ++i) {
      ptx::stmatrix_x4(smem_ + offsetof(Smem, p) + kLayout.offset(row + lane_ % 16, 2 * i + lane_ / 16),
                       {p[i][0], p[i][1], p[i][2], p[i][3]});
    }
    for_each_half(lane_, [&](int h, int r) {
      if (lane_ % 4 == 0) ptx::st_shared_4(note(group, row + r), float_bits(state.reference[h]));
    });
    ptx::fence_proxy_async();
    ptx::sync_warp();
    if (lane_ == 0) ptx::mbarrier_arrive(message(group));
  }

  // Waits for P of the other warpgroup's tile; state and O follow its references.
  FFPA_DEVICE void receive(Out& out, float (&of_out)[2], RowState& state, int group, int row) const {
    ptx::mbarrier_wait(message(1 - group), messages_ & 1);
    for_each_half(lane_, [&](int h, int r) {
      const float theirs = float_from_bits(ptx::ld_shared_4(note(1 - group, row + r)));
      state.sum[h] *= growth(state.reference[h], theirs);
      state.reference[h] = theirs;
    });
    follow(out, of_out, state.reference);
  }

  // Makes the sums of a thread those of whole rows. By now both warpgroups have the same references.
  FFPA_DEVICE void add_sums_of_groups(RowState& state, int group, int row) const {
    for_each_half(lane_, [&](int h, int r) {
      state.sum[h] = tile::sum_of_lanes(state.sum[h]);
      if (lane_ % 4 == 0) ptx::st_shared_4(sum(group, row + r), float_bits(state.sum[h]));
    });
    ptx::bar_sync(1 + tile::kConsumerGroups, tile::kConsumerGroups * tile::kGroupThreads);
    for_each_half(lane_,
                  [&](int h, int r) { state.sum[h] += float_from_bits(ptx::ld_shared_4(sum(1 - group, row + r))); });
  }

  uint32_t tiles_ = 0;     // tiles of its own that the warpgroup is done with
  uint32_t messages_ = 0;  // and those of the other one
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void forward_wgmma_latent(FFPA_GRID_CONSTANT const typename Config::Arguments arguments) {
  ForwardWgmmaLatent<Config>(arguments).run();
}

}  // namespace ffpa
