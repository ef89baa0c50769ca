// Attention forward on wgmma, for head dims whose O fits the registers. A persistent block takes row tiles of kRows
// rows, each with all keys that it sees or a part of them. Two warpgroups have 64 of the rows each; for each kKeys
// keys, one tile after the other:
//
//   S of the next tile = Q Kᵀ, and O += P V of this one, are queued together; while the second runs, S becomes P
//
// P never leaves its thread's registers: accumulators of S, packed, are an A operand.
//
// One warp brings Q once, and K and V in parts of 64 keys, in the order in which they are used (tile/box_ring.cuh).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

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
#include "tile/smem_plan.cuh"

namespace ffpa {

// Fields has Dtype; kColumns, the most columns of Q and K; kValueColumns, the most of V and O; kPaged, whether keys lie
// in pages.
template <class Fields>
struct ForwardWgmmaFusedConfig : Fields {
  using Params = AttentionParams;
  static constexpr int kRows = tile::kConsumerGroups * tile::kBox;
  // A tile has as many keys as O leaves registers for. A slot has all boxes of a row where one instruction reads them;
  // else it has one box, so that there are many slots.
  static constexpr int kKeys = Fields::kColumns <= 192 ? 128 : 64;
  static constexpr int kBoxes = Fields::kColumns / tile::kBox;  // boxes of a row
  static constexpr int kPartBoxes = kBoxes <= 4 ? kBoxes : 1;   // boxes of a slot
  static constexpr int kParts = kBoxes / kPartBoxes;
  static constexpr int kValueBoxes = Fields::kValueColumns / tile::kBox;
  static constexpr int kValueParts = kParts == 1 ? 1 : kValueBoxes, kValuePartBoxes = kValueBoxes / kValueParts;
  static_assert(kValuePartBoxes <= kPartBoxes, "a slot holds either");
  // Keys of V lie box by box; of pages, 16 by 16, and then box by box.
  static constexpr uint32_t kValueBoxBytes = Fields::kPaged ? kPageStepBytes : tile::kBoxBytes;
  static constexpr uint32_t kValueStepBytes = Fields::kPaged ? kValuePartBoxes * kPageStepBytes : 2 * tile::kAtomBytes;
  static constexpr int kProducers = kProducersOfKeys<Fields::kPaged>;
  static constexpr int kThreads = tile::kCoreThreads;
  static constexpr int kProducerRegisters = Fields::kColumns > 256 ? 24 : 40;  // registers of a thread
  static constexpr int kConsumerRegisters = Fields::kColumns > 256 ? 240 : 232;

  using Stores = tile::RowStores<1>;
  using Queries = QueryBoxes<kBoxes>;
  using Items = ItemQueue<>;
  template <int kSlots>
  struct SmemPlan {
    using Ring = tile::BoxRing<0, kPartBoxes, kSlots>;
    tile::SmemSlots<Ring> slots;
    tile::SmemBytes<Queries::kBytes> q;
    tile::SmemBytes<Stores::kBytes> stores[tile::kConsumerWarps];  // rows of O on their way
    tile::SmemBarriers<Ring::kBarrierBytes> ring_barriers;
    tile::SmemBarriers<Queries::kBarrierBytes> q_barriers;
    tile::SmemBytes<KeptRows::kBytes> kept[kProducers + tile::kConsumerWarps];
    tile::SmemBytes<Items::kBytes> items;
  };
  using Smem = SmemPlan<tile::most_slots<SmemPlan, 16>()>;
  using Ring = typename Smem::Ring;

  static LaunchShape launch_shape(const Params& params) {
    return persistent_shape(RowTiles<kRows>(params).count(), params.resident_blocks, kThreads, sizeof(Smem),
                            reinterpret_cast<uint32_t*>(params.scratch));
  }

  using Arguments =
      std::conditional_t<Fields::kPaged, PagedForwardArguments<kRows, kValuePartBoxes>, WgmmaForwardArguments<kRows>>;
};

template <class Config>
class ForwardWgmmaFused : WgmmaBlock<Config> {
  using Base = WgmmaBlock<Config>;
  using Base::arguments_, Base::params_, Base::lane_, Base::warp_, Base::smem_;
  using Base::ring, Base::kept_rows, Base::item_queue, Base::queries, Base::take_item, Base::bring_row_tiles;
  using Element = typename Config::Dtype;
  using Ring = typename Config::Ring;
  static constexpr int kRows = Config::kRows;
  static constexpr int kKeys = Config::kKeys;
  static constexpr int kKeySteps = kKeys / tile::kBox;
  static constexpr int kSlotsOfKeys = kKeySteps * Config::kParts, kSlotsOfValues = kKeySteps * Config::kValueParts;
  using Scores = ScoreSums<kKeySteps>;
  using Probabilities = PackedProbabilities<kKeySteps>;
  // Words of masks are loaded while products run where that takes few spills.
  static constexpr bool kMaskAhead = !Config::kPaged && (Config::kColumns <= 128 || Config::kColumns == 256);
  using Mask = std::conditional_t<kMaskAhead, MaskAhead<kKeySteps, tile::kBox / 8>, NoMaskAhead>;
  using Out = float[Config::kValueColumns / 2];
  using Producer = tile::BoxProducer<Ring, Config::kProducers>;

 public:
  FFPA_DEVICE explicit ForwardWgmmaFused(const typename Config::Arguments& arguments)
      : Base(arguments, arguments.params), slots_(ring(), lane_) {}

  FFPA_DEVICE void run() {
    Base::begin([&] {
      item_queue().init(tile::kConsumerWarps + Config::kProducers - 1);
      queries().init();
      ring().init(Config::kProducers);
    });
    ptx::sync_block();
    Base::run_roles([&](int producer) { produce(producer); }, [&](int group, int warp) { consume(group, warp); });
  }

 private:
  // ---- the warps that produce ----

  FFPA_DEVICE void produce(int warp) const {
    Producer producer(ring(), lane_, warp);
    auto items = item_queue();
    const auto has_keys = [&](const SharedRowTile& rows) { return !visible_part(rows, kKeys, params_).is_empty(); };
    bring_row_tiles(
        warp, [&] { return warp > 0 ? items.get(lane_) : take_item(items, params_.scratch, has_keys); },
        [&](const SharedRowTile& rows, auto& keys) {
          const TileRange tiles = visible_part(rows, kKeys, params_);
          const int n_k = rows.n_k();
          FFPA_NO_UNROLL
          for (int tile = tiles.first; tile <= tiles.end; ++tile) {
            if (tile < tiles.end) bring_keys(producer, keys, tile * kKeys);
            if (tile > tiles.first) bring_values(producer, keys, (tile - 1) * kKeys, n_k);
          }
        });
  }

  template <class Keys>
  FFPA_DEVICE void bring_keys(Producer& producer, Keys& keys, int first_key) const {
    constexpr int kBoxes = Config::kPartBoxes;
    FFPA_NO_UNROLL
    for (int key = first_key; key < first_key + kKeys; key += tile::kBox) {
      const auto runs = keys.find(key);
      FFPA_NO_UNROLL
      for (int part = 0; part < Config::kParts; ++part) {
        producer.bring(keys.keys(arguments_.k, part * kBoxes * tile::kBox, kBoxes, runs), kBoxes);
      }
    }
  }

  // Rows from `end` on become zeros.
  template <class Keys>
  FFPA_DEVICE void bring_values(Producer& producer, Keys& keys, int first_key, int end) const {
    constexpr int kBoxes = Config::kValuePartBoxes;
    FFPA_NO_UNROLL
    for (int key = first_key; key < first_key + kKeys; key += tile::kBox) {
      const auto runs = keys.find(key);
      FFPA_NO_UNROLL
      for (int part = 0; part < Config::kValueParts; ++part) {
        producer.template bring_live_rows<Keys::kTogether>(
            keys.live_rows(key, end), keys.values(arguments_.v, part * kBoxes * tile::kBox, kBoxes, runs), kBoxes);
      }
    }
  }

  // ---- the warpgroups that multiply ----

  FFPA_DEVICE void consume(int group, int group_warp) {
    const int warp = group * tile::kGroupWarps + group_warp, row = warp * 16;  // first row of the warp in the tile
    typename Config::Stores stores(smem_ + offsetof(typename Config::Smem, stores) + warp * Config::Stores::kBytes,
                                   lane_);
    const KeptRows kept = kept_rows(Config::kProducers + warp);
    auto items = item_queue();
    uint32_t parity = 0;
    const bool mask_in_pairs = kMaskAhead && has_mask_pairs(params_.mask);
    for_each_row_tile(
        params_, arguments_.row_tiles, kept, lane_, [&] { return items.get(lane_); },
        [&] {
          RowState state;
          Out out;
          ptx::mbarrier_wait(queries().full(), parity);
          parity ^= 1;
          const TileRange tiles = visible_part(kept.get(), kKeys, params_);
          if (!has_row(kept.get(), group * tile::kBox)) {
            slots_.pass((tiles.end - tiles.first) * (kSlotsOfKeys + kSlotsOfValues));
            queries().release(lane_);
            return;
          }
          if (tiles.first < tiles.end) {
            Scores scores;
            Probabilities p;
            Mask mask(mask_in_pairs, params_.mask, kept.get(), row, lane_);
            queue_scores(scores, group);
            mask.load(tiles.first * kKeys);
            ptx::wgmma_wait_group<0>();
            slots_.release(kSlotsOfKeys);
            to_probabilities<kRulesOf<Config::kPaged>>(scores, params_, kept, tiles.first * kKeys, row, state, lane_,
                                                       mask);
            pack_probabilities<Element>(p, scores);
            FFPA_NO_UNROLL
            for (int tile = tiles.first + 1; tile < tiles.end; ++tile) {
              queue_scores(scores, group);
              queue_product(out, p, tile > tiles.first + 1);
              mask.load(tile * kKeys);
              ptx::wgmma_wait_group<1>();
              slots_.release(kSlotsOfKeys);
              const float before[2] = {state.reference[0], state.reference[1]};
              const bool moved = to_probabilities<kRulesOf<Config::kPaged>>(scores, params_, kept, tile * kKeys, row,
                                                                            state, lane_, mask);
              ptx::wgmma_wait_group<0>();
              slots_.release(kSlotsOfValues);
              if (moved) rescale(out, before, state.reference);
              pack_probabilities<Element>(p, scores);
            }
            queries().release(lane_);
            queue_product(out, p, tiles.end > tiles.first + 1);
            ptx::wgmma_wait_group<0>();
            slots_.release(kSlotsOfValues);
          } else {
            queries().release(lane_);
            FFPA_UNROLL
            for (float& sum : out) sum = 0;
          }
          finish_rows(params_, kept.get(), row, state, lane_);
          if (params_.splits > 1 && tiles.first == tiles.end) return;  // nobody reads O of a part without keys
          write_out<Element>(out, stores, arguments_.out, params_, kept.get(), row, 0, state.sum, lane_);
        });
    stores.wait();
  }

  // Queues scores = Q Kᵀ of the next tile, as a group of its own.
  FFPA_DEVICE void queue_scores(Scores& scores, int group) {
    if constexpr (Config::kColumns > 256)
      group = tile::consumer_group_anew();  // else the places of Q wait in spilled registers
    FFPA_UNROLL
    for (int step = 0; step < kKeySteps; ++step) {
      FFPA_UNROLL
      for (int part = 0; part < Config::kParts; ++part) {
        const uint64_t k = slots_.next();
        ptx::wgmma_fence();
        add_scores<Element>(scores[step], queries(), part * Config::kPartBoxes, Config::kPartBoxes, group, k, part > 0);
      }
    }
    ptx::wgmma_commit_group();
  }

  // Queues out += P V of a tile, as a group of its own.
  FFPA_DEVICE void queue_product(Out& out, const Probabilities& p, bool accumulate) {
    FFPA_UNROLL
    for (int step = 0; step < kKeySteps; ++step) {
      FFPA_UNROLL
      for (int part = 0; part < Config::kValueParts; ++part) {
        constexpr int kPartColumns = Config::kValuePartBoxes * tile::kBox;
        using Sums = float[kPartColumns / 2];
        const uint64_t v = slots_.next(Config::kValueBoxBytes);
        ptx::wgmma_fence();
        FFPA_UNROLL
        for (int depth = 0; depth < tile::kBox / 16; ++depth) {
          ptx::wgmma_rs<Element, kPartColumns, tile::Major::kMN>(
              reinterpret_cast<Sums&>(out[part * kPartColumns / 2]), p[step * 4 + depth],
              v + depth * Config::kValueStepBytes / 16, accumulate || step + depth > 0);
        }
      }
    }
    ptx::wgmma_commit_group();
  }

  tile::SlotReader<Ring> slots_;
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void forward_wgmma_fused(FFPA_GRID_CONSTANT const typename Config::Arguments arguments) {
  ForwardWgmmaFused<Config>(arguments).run();
}

}  // namespace ffpa
