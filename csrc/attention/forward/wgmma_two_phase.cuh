// This is the attention forward on wgmma for head dims whose O fits neither registers nor shared memory. O is computed
// from P in memory: S is never computed twice, and both products run at the speed of a matrix product. A block takes
// row tiles of kRows rows of one query head, one after the other, and for each row tile one chunk of keys after the
// other:
//
//   1. for each tile of kKeys keys   S = Q Kᵀ over d_qk, in steps of 64; P̃ = exp2(S - m), 16 bits, by way of shared
//                                    memory and TMA to the block's own slice of the scratch
//   2. for some columns of d_v       O = P̃ V over the keys of the chunk, in steps of 64; divided by the row sum
//
// Step 2 is interrupted where a reference has moved (forward/two_phase_tiles.cuh); else it is nothing but a product.
//
// One warp brings the boxes, two warpgroups multiply (tile/box_ring.cuh); each has 64 of the rows, and a thread has the
// same two rows in both phases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "attention/forward/two_phase_tiles.cuh"
#include "attention/forward/wgmma_block.cuh"
#include "attention/forward/wgmma_steps.cuh"
#include "attention/key_boxes.cuh"
#include "attention/params/attention_params.h"
#include "attention/rows/item_queue.cuh"
#include "attention/rows/row_tile.cuh"
#include "attention/tensor_maps.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/box_ring.cuh"
#include "tile/fragments.cuh"
#include "tile/kept_value.cuh"
#include "tile/smem_plan.cuh"

namespace ffpa {

// Fields has Dtype; kColumns, the most columns of O at a time; kPaged, whether keys lie in pages.
template <class Fields>
struct ForwardWgmmaTwoPhaseConfig : Fields {
  using Params = AttentionParams;
  static constexpr int kRows = tile::kConsumerGroups * tile::kBox;
  static constexpr int kKeys = 256, kKeyBoxes = kKeys / tile::kBox;
  static constexpr int kValueBoxes = Fields::kColumns / tile::kBox;
  static_assert(kValueBoxes >= kKeyBoxes, "one ring serves both phases");
  using Scratch = TwoPhaseScratch<kRows, kKeys, Fields::kColumns>;
  using Ring = tile::BoxRing<kRows / tile::kBox, kValueBoxes, kValueBoxes == 4 ? 4 : 3>;
  static constexpr int kProducers = kProducersOfKeys<Fields::kPaged>;
  static constexpr int kThreads = tile::kCoreThreads;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // registers of a thread

  using Stores = tile::RowStores<2>;
  using Items = ItemQueue<>;
  struct Smem {
    tile::SmemSlots<Ring> slots;
    tile::SmemBytes<Stores::kBytes> stores[tile::kConsumerWarps];  // rows of P̃ on their way
    tile::SmemBarriers<Ring::kBarrierBytes> ring_barriers;
    tile::SmemBytes<MovedTiles::kBytes, 8> moves[tile::kConsumerWarps];  // notes on references
    tile::SmemBytes<KeptRows::kBytes> kept[kProducers + tile::kConsumerWarps];
    tile::SmemBytes<Items::kBytes> items;
  };
  static_assert(sizeof(Smem) <= tile::kMostSmemBytes, "what a block has");

  static LaunchShape launch_shape(const Params& params) {
    return persistent_shape(RowTiles<kRows>(params).count(), params.resident_blocks, kThreads, sizeof(Smem),
                            Scratch(params).taken());
  }

  using OfForward = std::conditional_t<Fields::kPaged, PagedForwardArguments<kRows, 0>, WgmmaForwardArguments<kRows>>;
  struct Arguments : OfForward {
    ptx::TensorMap p, rows_of_p;

    LaunchStatus fill(const Params& params) {
      const Scratch scratch(params);
      const LaunchStatus statuses[] = {
          OfForward::fill(params), map_matrix(p, scratch.p(), params.chunk_keys, scratch.p_rows()),
          map_matrix(rows_of_p, scratch.p(), params.chunk_keys, scratch.p_rows(), tile::kStoredRows)};
      return first_failure(statuses);
    }
  };
};

template <class Config>
class ForwardWgmmaTwoPhase : WgmmaBlock<Config> {
  using Base = WgmmaBlock<Config>;
  using Base::arguments_, Base::params_, Base::lane_, Base::warp_, Base::smem_;
  using Base::ring, Base::kept_rows, Base::item_queue;
  using Element = typename Config::Dtype;
  using Ring = typename Config::Ring;
  using Smem = typename Config::Smem;
  static constexpr int kRows = Config::kRows;
  static constexpr int kKeys = Config::kKeys;
  static constexpr int kBoxFragments = tile::kBox / 8;
  using Scores = float[1][kKeys / 2];
  using Chunk = KeyChunk<kKeys, tile::kBox>;
  using Producer = tile::BoxProducer<Ring, Config::kProducers>;

 public:
  FFPA_DEVICE explicit ForwardWgmmaTwoPhase(const typename Config::Arguments& arguments)
      : Base(arguments, arguments.params) {}

  FFPA_DEVICE void run() {
    Base::begin([&] {
      item_queue().init(tile::kConsumerWarps + Config::kProducers - 1);
      ring().init(Config::kProducers);
    });
    ptx::sync_block();
    Base::run_roles([&](int producer) { produce(producer); }, [&](int group, int warp) { consume(group, warp); });
  }

 private:
  FFPA_DEVICE int qk_steps() const { return ceil_div(params_.d_qk, tile::kBox); }
  FFPA_DEVICE typename Config::Scratch scratch() const { return typename Config::Scratch(params_); }

  // Calls function(first column, boxes) for the columns of O: kValueBoxes boxes at a time or one fewer.
  template <class Function>
  FFPA_DEVICE void for_each_columns(const Function& function) const {
    int boxes = ceil_div(params_.d_v, tile::kBox), column = 0;
    FFPA_NO_UNROLL
    for (int times = ceil_div(boxes, Config::kValueBoxes); times > 0; --times) {
      const int now = max_of(ceil_div(boxes, times), Config::kValueBoxes - 1);
      function(column, now);
      boxes -= now;
      column += now * tile::kBox;
    }
  }

  // Each warpgroup has a barrier. Another says that P̃ of a chunk is complete: warpgroups arrive, the producer waits.
  static FFPA_DEVICE int group_barrier(int group) { return 1 + group; }
  static constexpr int kCompleteBarrier = 1 + tile::kConsumerGroups;
  static constexpr int kCompleteThreads = tile::kConsumerGroups * tile::kGroupThreads + Config::kProducers * 32;

  // ---- the warps that produce ----

  FFPA_DEVICE void produce(int warp) const {
    Producer producer(ring(), lane_, warp);
    const KeptRows kept = kept_rows(warp);
    auto items = item_queue();
    const auto has_keys = [&](const SharedRowTile& rows) { return !visible_part(rows, kKeys, params_).is_empty(); };
    for_each_row_tile(
        params_, arguments_.row_tiles, kept, lane_,
        [&] { return warp > 0 ? items.get(lane_) : Base::take_item(items, scratch().taken(), has_keys); },
        [&] {
          auto keys = Base::keys_of(kept);
          Chunk::for_each(params_, kept.get(), [&](const Chunk& chunk) {
            bring_keys(producer, keys, kept.get(), chunk);
            ptx::sync_warp();
            ptx::bar_sync(kCompleteBarrier, kCompleteThreads);
            ptx::fence_proxy_async_global();
            if (chunk.counts(params_)) bring_values(producer, keys, kept.get().n_k(), chunk);
          });
        });
  }

  // Returns what brings `rows_a` rows of A by load_a, the first warp's work, and B by load_b.
  template <class LoadA, class LoadB>
  FFPA_DEVICE auto joined(int rows_a, const LoadA& load_a, const LoadB& load_b) const {
    constexpr uint32_t kBytesA = Ring::kBoxesA * tile::kBoxBytes;
    if constexpr (Config::kProducers > 1) {
      return [&, rows_a] {
        const auto part = load_b();
        const bool brings_a = warp_ == 0;
        return tile::part_of_step(part.bytes + (brings_a ? rows_a * tile::kBoxRowBytes : 0),
                                  [&load_a, part, brings_a](uint32_t boxes_smem, uint32_t barrier) {
                                    if (brings_a) load_a(boxes_smem, barrier);
                                    part.start(boxes_smem + kBytesA, barrier);
                                  });
      };
    } else {
      return [&](uint32_t boxes_smem, uint32_t barrier) {
        load_a(boxes_smem, barrier);
        load_b(boxes_smem + kBytesA, barrier);
      };
    }
  }

  template <class Keys>
  FFPA_DEVICE void bring_keys(Producer& producer, Keys& keys, const SharedRowTile& rows, const Chunk& chunk) const {
    const QueryTile<kRows> q(params_, rows);
    FFPA_NO_UNROLL
    for (int tile = chunk.first_tile; tile < chunk.end_tile; ++tile) {
      FFPA_NO_UNROLL
      for (int column = 0; column < params_.d_qk; column += tile::kBox) {
        const auto load_q = [&](uint32_t boxes_smem, uint32_t barrier) {
          q.load(boxes_smem, arguments_.q, barrier, column);
        };
        producer.bring(
            joined(q.rows, load_q, keys.keys(arguments_.k, column, 1, keys.template find<kKeys>(tile * kKeys))),
            Config::kKeyBoxes, tile::kBox, q.rows);
      }
    }
  }

  template <class Keys>
  FFPA_DEVICE void bring_values(Producer& producer, Keys& keys, int n_k, const Chunk& chunk) const {
    const int p_row = ptx::block_x() * kRows;
    for_each_columns([&](int column, int boxes) {
      if (chunk.steps() == 0) producer.bring_zeros();
      FFPA_NO_UNROLL
      for (int key = chunk.keys.begin; key < chunk.keys.end; key += tile::kBox) {
        const auto load_p = [&](uint32_t boxes_smem, uint32_t barrier) {
          for (int box = 0; box < Ring::kBoxesA; ++box, boxes_smem += tile::kBoxBytes) {
            ptx::tma_load_2d<ptx::Evict::kSoon>(boxes_smem, &arguments_.p, barrier, key - chunk.first_key(),
                                                p_row + box * tile::kBox);
          }
        };
        producer.bring_live_rows(keys.live_rows(key, n_k),
                                 joined(kRows, load_p, keys.keys(arguments_.v, column, boxes, keys.find(key))), boxes);
      }
    });
  }

  // ---- the warpgroups that multiply ----

  FFPA_DEVICE void consume(int group, int group_warp) const {
    tile::BoxConsumer<Ring> consumer(ring(), group, lane_);
    const int warp = group * tile::kGroupWarps + group_warp, row = warp * 16;  // first row of the warp in the tile
    typename Config::Stores stores(smem_ + offsetof(Smem, stores) + warp * Config::Stores::kBytes, lane_);
    const KeptRows kept = kept_rows(Config::kProducers + warp);
    auto items = item_queue();
    for_each_row_tile(
        params_, arguments_.row_tiles, kept, lane_, [&] { return items.get(lane_); },
        [&] {
          RowState state;
          Chunk::for_each(params_, kept.get(), [&](const Chunk& chunk) {
            if (!has_row(kept.get(), group * tile::kBox)) return pass(consumer, chunk);
            const float before[2] = {state.reference[0], state.reference[1]};
            MovedTiles moves(moves_smem(group, group_warp));
            FFPA_NO_UNROLL
            for (int tile = 0; tile < chunk.tiles(); ++tile) {
              Scores scores = {};  // without zeros their registers would be taken throughout the other phase
              consumer.template multiply<Element, kKeys, tile::Major::kK, tile::Major::kK>(scores, qk_steps());
              const bool moved = to_probabilities<kRulesOf<Config::kPaged>>(
                  reinterpret_cast<ScoreSums<Config::kKeyBoxes>&>(scores), params_, kept,
                  (chunk.first_tile + tile) * kKeys, row, state, lane_);
              if (lane_ % 4 == 0) keep_references(tile, row, state);
              store(stores, scores, tile * kKeys, row);
              moves.add(tile, moved, lane_);
            }
            stores.wait();
            ptx::bar_sync(group_barrier(group), tile::kGroupThreads);  // the notes of all its warps are there
            ptx::bar_arrive(kCompleteBarrier, kCompleteThreads);

            if (chunk.is_last) finish_rows(params_, kept.get(), row, state, lane_);
            if (!chunk.counts(params_)) return;
            const float factor[2] = {growth(before[0], state.reference[0]), growth(before[1], state.reference[1])};
            for_each_columns([&](int column, int boxes) {
              const auto compute = [&](auto width) {
                float out[1][decltype(width)::value / 2] = {};
                multiply_with_values(consumer, out, chunk, group, row);
                finish(out[0], stores, kept.get(), chunk, row, column, state, factor);
              };
              if (boxes == Config::kValueBoxes) {
                compute(std::integral_constant<int, Config::kColumns>());
              } else {
                compute(std::integral_constant<int, Config::kColumns - tile::kBox>());
              }
            });
            ptx::bar_sync(group_barrier(group), tile::kGroupThreads);  // all have read the notes
          });
        });
    stores.wait();
  }

  // Gives the slots of a chunk back unread, where the warpgroup has no rows.
  FFPA_DEVICE void pass(tile::BoxConsumer<Ring>& consumer, const Chunk& chunk) const {
    consumer.pass(chunk.tiles() * qk_steps());
    ptx::bar_arrive(kCompleteBarrier, kCompleteThreads);
    if (!chunk.counts(params_)) return;
    for_each_columns([&](int, int) { consumer.pass(max_of(chunk.steps(), 1)); });
  }

  // Computes out = P̃ V over a chunk, from one tile where a reference of the warpgroup has moved to the next.
  template <int kSums>
  FFPA_DEVICE void multiply_with_values(tile::BoxConsumer<Ring>& consumer, float (&out)[1][kSums], const Chunk& chunk,
                                        int group, int row) const {
    int tile = 0;
    FFPA_NO_UNROLL
    while (true) {
      const int next = MovedTiles::next<tile::kGroupWarps>(moves_smem(group, 0), tile + 1, chunk.tiles());
      consumer.template multiply<Element, 2 * kSums, tile::Major::kK, tile::Major::kMN>(
          out, max_of(chunk.steps(tile, next), 1), tile > 0);
      if (next >= chunk.tiles()) return;
      tile = next;
      const float* references = scratch().references(ptx::block_x()) + tile * kRows + row;
      FFPA_UNROLL
      for (int h = 0; h < 2; ++h) {
        const float* now = references + tile::c_coordinate(lane_, 2 * h).row;
        const float factor =
            growth(float_from_bits(ptx::ld_global_4(now - kRows)), float_from_bits(ptx::ld_global_4(now)));
        FFPA_UNROLL
        for (int n = 0; n < kSums / 4; ++n) {
          out[0][4 * n + 2 * h] *= factor;
          out[0][4 * n + 2 * h + 1] *= factor;
        }
      }
    }
  }

  FFPA_DEVICE uint32_t moves_smem(int group, int group_warp) const {
    return smem_ + offsetof(Smem, moves) + (group * tile::kGroupWarps + group_warp) * MovedTiles::kBytes;
  }

  // ---- 1. P̃ of a tile ----

  // Writes the references of a tile to the slice; lane 0 of each row's four calls this.
  FFPA_DEVICE void keep_references(int tile_of_chunk, int row, const RowState& state) const {
    float* references = scratch().references(ptx::block_x()) + tile_of_chunk * kRows + row;
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      ptx::st_global_4(references + tile::c_coordinate(lane_, 2 * h).row, float_bits(state.reference[h]));
    }
  }

  // Stores P̃ of a tile to the block's slice.
  FFPA_DEVICE void store(typename Config::Stores& stores, const Scores& p, int column, int row) const {
    FFPA_UNROLL
    for (int box = 0; box < Config::kKeyBoxes; ++box) {
      tile::PackedRows packed;
      FFPA_UNROLL
      for (int i = 0; i < kBoxFragments * 2; ++i) {
        const int at = (box * kBoxFragments * 2 + i) * 2;
        packed[i] = ptx::pack<Element>(p[0][at], p[0][at + 1]);
      }
      stores.store(packed, [&](uint32_t rows_smem) {
        ptx::tma_store_2d<ptx::Evict::kSoon>(&arguments_.rows_of_p, rows_smem, column + box * tile::kBox,
                                             ptx::block_x() * kRows + row);
      });
    }
  }

  // ---- 2. O ----

  // Adds what earlier chunks left of O, and stores it for a later chunk or as the result. The sums of products stay as
  // they are: ptxas would serialise the products.
  template <int kSums>
  FFPA_DEVICE void finish(const float (&out)[kSums], typename Config::Stores& stores, const SharedRowTile& rows,
                          const Chunk& chunk, int row, int column, const RowState& state,
                          const float (&factor)[2]) const {
    const auto write = [&](const float (&of_all)[kSums]) {
      write_out<Element>(of_all, stores, arguments_.out, params_, rows, row, column, state.sum, lane_);
    };
    if (chunk.is_first && chunk.is_last) {
      write(out);
      return;
    }
    float* partial = scratch().out(ptx::block_x(), column) + row * 2 * kSums;
    float of_all[kSums];
    FFPA_UNROLL
    for (int n = 0; n < kSums / 4; ++n) {
      FFPA_UNROLL
      for (int e = 0; e < 4; ++e) of_all[4 * n + e] = out[4 * n + e];
      add_chunks(reinterpret_cast<float (&)[4]>(of_all[4 * n]), chunk, partial, n, factor, lane_);
    }
    if (chunk.is_last) write(of_all);
  }
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void forward_wgmma_two_phase(FFPA_GRID_CONSTANT const typename Config::Arguments arguments) {
  ForwardWgmmaTwoPhase<Config>(arguments).run();
}

}  // namespace ffpa
