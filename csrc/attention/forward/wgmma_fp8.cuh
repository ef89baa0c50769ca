// Attention forward of 8-bit floats on wgmma, for head dims whose O fits the registers of two warpgroups. A persistent
// block takes row tiles of kRows rows of one query head. Both warpgroups have all of the rows, and each has half of the
// columns of O. They turn tiles of kKeys keys into P alternately: while one has exponentials to compute, the other has
// products to wait for.
//
//   every other tile: S = Q Kᵀ; P, rounded to 8 bits, to shared memory, with the references of its rows
//   every tile: O += P V of the tile before, some columns at a time
//
// Three things keep it exact. P is scaled up to use the range of its type. A tile's product with V, and its sum of P,
// are sums of their own, added in float (Hopper adds products of 8-bit floats in 14 bits). Each row is divided by the
// sum of its rounded P.
//
// Each warpgroup has references (softmax.cuh) of its own, those of the tiles that it turns into P, and O has the
// largest. A product with a smaller one is scaled down, by a power of two, as it is added.
//
// A thread has scores of two neighbouring keys of each 8, and 4 neighbouring bytes of P: keys 0, 1, 8 and 9 of each 16,
// and the next thread 2, 3, 10 and 11. V comes with its keys in that order.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "attention/forward/wgmma_block.cuh"
#include "attention/forward/wgmma_steps.cuh"
#include "attention/params/fp8_params.h"
#include "attention/rows/item_queue.cuh"
#include "attention/rows/row_tile.cuh"
#include "attention/rows/row_tiles.cuh"
#include "attention/score_rules.cuh"
#include "attention/softmax.cuh"
#include "attention/tensor_maps.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/box_ring.cuh"
#include "tile/fragment_output.cuh"
#include "tile/fragments.cuh"
#include "tile/smem_layout.cuh"
#include "tile/smem_plan.cuh"

namespace ffpa {

// The scales of one row tile: that of its rows of Q, and where those of K and V begin; null says that all are 1.
struct RowScales {
  const float *k, *v;
  float q;
};

// Fields has Dtype of Q, K and V; kColumns, the most columns of Q, K, V and O.
template <class Fields>
struct ForwardWgmmaFp8Config : Fields {
  using Params = Fp8Params;
  static constexpr bool kPaged = false;  // 8-bit keys in pages become 16-bit numbers
  static constexpr int kRows = tile::kBox;
  static constexpr int kKeySteps = 2, kKeys = kKeySteps * tile::kBox;  // keys of a tile
  static_assert(kKeys == kScaledRows && kScaledRows % kRows == 0, "a tile has one scale of Q, one of K and one of V");
  static constexpr int kOwnColumns = Fields::kColumns / tile::kConsumerGroups;  // columns of O in a warpgroup
  // Products with V have kChunkColumns columns.
  static constexpr int kChunks = ceil_div(kOwnColumns, 128), kChunkColumns = kOwnColumns / kChunks;
  static constexpr int kBoxColumns = 2 * tile::kBox;
  static constexpr int kBoxes = ceil_div(Fields::kColumns, kBoxColumns);  // boxes of a row of Q and K
  static constexpr int kThreads = tile::kCoreThreads;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;  // registers of a thread

  static constexpr int kProducers = tile::kConsumerGroups, kKeepers = kProducers + tile::kConsumerWarps;
  using Queries = QueryBoxes<kBoxes, 1>;
  using Items = ItemQueue<>;
  using KeptScales = tile::KeptValue<RowScales>;
  static constexpr int kTilesOfP = 2;
  static_assert(kChunkColumns <= kKeys, "a slot holds a chunk of V, too");
  template <int kSlots>
  struct SmemPlan {
    using Ring = tile::BoxRing<0, kKeySteps, kSlots, 1, 1>;  // its slots have a box of columns of K, or a chunk of V
    tile::SmemSlots<Ring> slots[tile::kConsumerGroups];
    tile::SmemBytes<Queries::kBytes> q;
    tile::SmemBytes<tile::kBoxBytes> p[kTilesOfP];
    tile::SmemBytes<tile::kAtomBytes> ones;  // what P is multiplied with for its sums
    float references[kTilesOfP][kRows];      // those that P refers to
    float sums[tile::kConsumerGroups][kRows][2];
    tile::SmemBarriers<Ring::kBarrierBytes> ring_barriers[tile::kConsumerGroups];
    tile::SmemBarriers<Queries::kBarrierBytes> q_barriers;
    tile::SmemBarriers<(2 * kTilesOfP + tile::kConsumerGroups) * 8> turn_barriers;
    tile::SmemBytes<KeptRows::kBytes> kept[kKeepers];
    tile::SmemBytes<KeptScales::kBytes> scales[kKeepers];
    tile::SmemBytes<Items::kBytes> items;
  };
  using Smem = SmemPlan<tile::most_slots<SmemPlan, 8>()>;
  using Ring = typename Smem::Ring;

  static LaunchShape launch_shape(const Params& params) {
    const AttentionParams& attention = params.attention;
    return persistent_shape(RowTiles<kRows>(attention).count(), attention.resident_blocks, kThreads, sizeof(Smem),
                            reinterpret_cast<uint32_t*>(attention.scratch));
  }

  struct Arguments {
    Params params;
    RowTiles<kRows> row_tiles;
    ptx::TensorMap q, k, v;

    LaunchStatus fill(const Params& of_call) {
      params = of_call;
      row_tiles = RowTiles<kRows>(params.attention);
      const AttentionParams& attention = params.attention;
      const int heads_kv = attention.heads_q / attention.group;
      const LaunchStatus statuses[] = {
          map_queries(q, attention, attention.q, attention.d_qk), map_keys(k, attention, attention.k, attention.d_qk),
          map_tensor(v, attention.v, params.arranged_keys, attention.d_v, heads_kv, attention.batch, kChunkColumns)};
      return first_failure(statuses);
    }
  };
};

template <class Config>
class ForwardWgmmaFp8 : WgmmaBlock<Config> {
  using Base = WgmmaBlock<Config>;
  using Base::arguments_, Base::params_, Base::lane_, Base::warp_, Base::smem_;
  using Base::ring, Base::kept_rows, Base::item_queue, Base::queries;
  using Element = typename Config::Dtype;
  using Ring = typename Config::Ring;
  using Smem = typename Config::Smem;
  static constexpr int kRows = Config::kRows;
  static constexpr int kKeys = Config::kKeys;
  static constexpr int kDepth = 32;                               // depth of a product
  static constexpr int kBoxSteps = Config::kBoxColumns / kDepth;  // products in a box, of 32 bytes each
  using Scores = ScoreSums<Config::kKeySteps>;
  using Chunk = float[Config::kChunkColumns / 2];
  using Slots = tile::SlotReader<Ring>;

  // P is 2^kPExponent at a maximum that is its own reference. References are integers, none below its maximum: this
  // leaves the largest P a little below the largest number.
  static constexpr float kPExponent = std::is_same<Element, E4M3>::value ? 8.75f : 15.75f;

 public:
  FFPA_DEVICE explicit ForwardWgmmaFp8(const typename Config::Arguments& arguments)
      : Base(arguments, arguments.params.attention) {}

  FFPA_DEVICE void run() {
    Base::begin([&] {
      item_queue().init(tile::kConsumerWarps + Config::kProducers - 1);
      queries().init();
      for (int group = 0; group < tile::kConsumerGroups; ++group) {
        ptx::mbarrier_init(p_full(group), tile::kGroupWarps);
        ptx::mbarrier_init(p_empty(group), tile::kConsumerWarps);
        ptx::mbarrier_init(turn(group), tile::kGroupWarps);
        ring(group).init();
      }
    });
    if (ptx::thread_x() < sizeof(Smem::ones) / 16) {
      const uint32_t ones = ptx::pack4<Element>(1, 1, 1, 1);
      ptx::st_shared_16(smem_ + offsetof(Smem, ones) + ptx::thread_x() * 16, {ones, ones, ones, ones});
      ptx::fence_proxy_async();
    }
    ptx::sync_block();
    tile::run_roles<Config, Config::kProducers>(
        warp_, [&](int group) { produce(group); }, [&](int group, int warp) { consume(group, warp); });
  }

 private:
  // Keepers are the producers and the warps that multiply.
  FFPA_DEVICE typename Config::KeptScales kept_scales(int keeper) const {
    using KeptScales = typename Config::KeptScales;
    return KeptScales(smem_ + offsetof(Smem, scales) + keeper * KeptScales::kBytes);
  }

  // These are barriers of the tiles of P that a warpgroup makes. p_full() says that one is there, p_empty() that all
  // have read it, turn() that it is the warpgroup's turn: the other has S of the tile before.
  FFPA_DEVICE uint32_t p_full(int group) const { return smem_ + offsetof(Smem, turn_barriers) + group * 8; }
  FFPA_DEVICE uint32_t p_empty(int group) const { return p_full(Config::kTilesOfP + group); }
  FFPA_DEVICE uint32_t turn(int group) const { return p_empty(Config::kTilesOfP + group); }
  FFPA_DEVICE uint32_t p_smem(int group) const { return smem_ + offsetof(Smem, p) + group * tile::kBoxBytes; }
  FFPA_DEVICE uint32_t reference_of(int group, int r) const {
    return smem_ + offsetof(Smem, references) + group * (kRows * 4) + r * 4;
  }

  // Return the warpgroup that turns a tile into P, and the tile's parity among those of that warpgroup; `tile` counts
  // all tiles that the block has.
  static FFPA_DEVICE int maker(uint32_t tile) { return tile % 2; }
  static FFPA_DEVICE uint32_t parity_of(uint32_t tile) { return tile / 2 % 2; }

  // ---- the producers: a warp for each warpgroup ----

  FFPA_DEVICE void produce(int group) const {
    tile::BoxProducer<Ring> producer(ring(group), lane_);
    const KeptRows kept = kept_rows(group);
    auto items = item_queue();
    uint32_t parity = 1, counted = 0;  // `counted` goes on over all row tiles
    for_each_row_tile(
        params_, arguments_.row_tiles, kept, lane_,
        [&] {
          return group == 0 ? items.take(params_.scratch, arguments_.row_tiles.count(), lane_) : items.get(lane_);
        },
        [&] {
          const SharedRowTile rows = kept.get();
          if (group == 0) {
            const MapPlace place = {rows.first, rows.head(), rows.batch()};
            queries().bring(parity, kRows, [&](uint32_t box_smem, uint32_t barrier, int column) {
              load_box(box_smem, arguments_.q, barrier, place, column, 0);
            });
          }
          parity ^= 1;
          const TileRange tiles = visible_tiles(rows, kKeys);
          const MapPlace place = {0, rows.head() / params_.group, rows.batch()};
          FFPA_NO_UNROLL
          for (int tile = tiles.first; tile <= tiles.end; ++tile, ++counted) {
            if (tile < tiles.end && maker(counted) == group) bring_keys(producer, place, tile * kKeys);
            if (tile > tiles.first) bring_values(producer, place, (tile - 1) * kKeys, group);
          }
          --counted;  // the last turn has values alone
        });
  }

  FFPA_DEVICE void bring_keys(tile::BoxProducer<Ring>& producer, const MapPlace& place, int key) const {
    FFPA_NO_UNROLL
    for (int box = 0; box < Config::kBoxes; ++box) {
      producer.bring([&](uint32_t boxes_smem, uint32_t barrier) {
        for (int step = 0; step < Config::kKeySteps; ++step, boxes_smem += tile::kBoxBytes) {
          load_box(boxes_smem, arguments_.k, barrier, place, box * tile::kBox, key + step * tile::kBox);
        }
      });
    }
  }

  // Brings the columns of V of a warpgroup, which are rows of the arranged V.
  FFPA_DEVICE void bring_values(tile::BoxProducer<Ring>& producer, const MapPlace& place, int key, int group) const {
    FFPA_NO_UNROLL
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      producer.bring(
          [&](uint32_t boxes_smem, uint32_t barrier) {
            load_box(boxes_smem, arguments_.v, barrier, place, key / 2,
                     group * Config::kOwnColumns + chunk * Config::kChunkColumns);
          },
          1, Config::kChunkColumns);
    }
  }

  // ---- the warpgroups that multiply ----

  // The place of a warp that multiplies.
  struct WarpPlace {
    int group, row;  // first row of the warp, in the tile
  };

  // State of the two rows that a thread owns: RowState, of the tiles that its warpgroup turns into P; the references of
  // O; and the sums of the rounded P of all tiles, relative to these.
  struct State : RowState {
    float of_out[2] = {-kInfinity, -kInfinity}, rounded[2] = {0, 0};
  };

  FFPA_DEVICE void consume(int group, int group_warp) {
    const WarpPlace at = {group, group_warp * 16};
    const int keeper = Config::kProducers + group * tile::kGroupWarps + group_warp;
    const KeptRows kept = kept_rows(keeper);
    const typename Config::KeptScales scales = kept_scales(keeper);
    Slots slots(ring(group), lane_);
    auto items = item_queue();
    uint32_t parity = 0, counted = 0;  // `counted` goes on over all row tiles
    for_each_row_tile(
        params_, arguments_.row_tiles, kept, lane_, [&] { return items.get(lane_); },
        [&] {
          scales.keep(row_scales(kept.get()), lane_);
          State state;
          Chunk out[Config::kChunks];
          FFPA_UNROLL
          for (Chunk& chunk : out) {
            FFPA_UNROLL
            for (float& value : chunk) value = 0;
          }
          ptx::mbarrier_wait(queries().full(), parity);
          parity ^= 1;
          const TileRange tiles = visible_tiles(kept.get(), kKeys);
          FFPA_NO_UNROLL
          for (int tile = tiles.first; tile <= tiles.end; ++tile, ++counted) {
            if (tile < tiles.end && maker(counted) == group) {
              make_probabilities(at, slots, state, kept, scales.get(), tile, parity_of(counted));
            }
            if (tile > tiles.first) add_products(at, slots, out, state, scales.get(), tile - 1, counted - 1);
          }
          --counted;  // the last turn had no tile to turn into P
          queries().release(lane_);
          float factor[2];
          finish(factor, state, kept.get(), at);
          write_out(out, factor, kept.get(), group, at.row);
        });
  }

  // Puts P of a tile, rounded, into shared memory.
  FFPA_DEVICE void make_probabilities(const WarpPlace& at, Slots& slots, State& state, const KeptRows& kept,
                                      const RowScales& scales, int tile, uint32_t parity) {
    const float scale = scales.q * scale_of(scales.k, arguments_.params.k_scale, tile);
    Scores scores;
    // Turns keep one warpgroup at products while the other has exponentials.
    ptx::mbarrier_wait(turn(at.group), at.group == 0 ? parity ^ 1 : parity);
    multiply_queries(scores, slots);
    ptx::sync_warp();
    if (lane_ == 0) ptx::mbarrier_arrive(turn(1 - at.group));
    to_probabilities_of_8_bits(scores, params_, kept.get(), tile * kKeys, at.row, state, lane_, scale, kPExponent);
    ptx::mbarrier_wait(p_empty(at.group), parity ^ 1);
    constexpr tile::RowLayout kLayout(tile::kBoxRowBytes);
    const auto packed = [&](int i, int h) {  // this thread's 4 of 16 keys
      const float (&first)[4] = scores[i / 4][0][i % 4 * 2], (&second)[4] = scores[i / 4][0][i % 4 * 2 + 1];
      return ptx::pack4<Element>(first[2 * h], first[2 * h + 1], second[2 * h], second[2 * h + 1]);
    };
    FFPA_UNROLL
    for (int i = 0; i < kKeys / 16; i += 2) {  // matrices: rows 0 … 7 and 8 … 15 of 16 keys, then the next
      ptx::stmatrix_x4(p_smem(at.group) + at.row * tile::kBoxRowBytes + kLayout.offset(lane_ % 16, i + lane_ / 16),
                       {packed(i, 0), packed(i, 1), packed(i + 1, 0), packed(i + 1, 1)});
    }
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      if (lane_ % 4 == 0) ptx::st_shared_4(reference_of(at.group, row_of(h, at)), float_bits(state.reference[h]));
    }
    ptx::fence_proxy_async();
    ptx::sync_warp();
    if (lane_ == 0) ptx::mbarrier_arrive(p_full(at.group));
  }

  // Computes scores = Q Kᵀ of the keys of the next slots, part after part.
  FFPA_DEVICE void multiply_queries(Scores& scores, Slots& slots) const {
    FFPA_UNROLL
    for (int box = 0; box < Config::kBoxes; ++box) {
      const uint64_t k = slots.next(), q = tile::boxes_descriptor(queries().box(box, 0));
      ptx::wgmma_fence();
      FFPA_UNROLL
      for (int step = 0; step < min_of(kBoxSteps, Config::kColumns / kDepth - box * kBoxSteps); ++step) {
        using Products = float[kKeys / 2];
        ptx::wgmma_ss<Element, kKeys>(reinterpret_cast<Products&>(scores), q + step * 2, k + step * 2, box + step > 0);
      }
      ptx::wgmma_commit_group();
      if (box == 0) continue;
      ptx::wgmma_wait_group<1>();
      slots.release();
    }
    ptx::wgmma_wait_group<0>();
    slots.release();
  }

  // Adds P V of a tile to out, chunk after chunk, and sums P in the same way: so these sums lose the same part of both.
  FFPA_DEVICE void add_products(const WarpPlace& at, Slots& slots, Chunk (&out)[Config::kChunks], State& state,
                                const RowScales& scales, int tile, uint32_t counted) {
    const int maker = ForwardWgmmaFp8::maker(counted);
    const float scale = scale_of(scales.v, arguments_.params.v_scale, tile);
    ptx::mbarrier_wait(p_full(maker), parity_of(counted));
    float reference[2];
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) reference[h] = float_from_bits(ptx::ld_shared_4(reference_of(maker, row_of(h, at))));
    follow(out, state, reference);
    const float part[2] = {growth(reference[0], state.of_out[0]), growth(reference[1], state.of_out[1])};
    const uint64_t p = tile::boxes_descriptor(p_smem(maker)),
                   ones = tile::boxes_descriptor(smem_ + offsetof(Smem, ones));
    FFPA_UNROLL
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      Chunk products;
      float sums[4];
      const uint64_t v = slots.next();
      ptx::wgmma_fence();
      FFPA_UNROLL
      for (int step = 0; step < kKeys / kDepth; ++step) {
        ptx::wgmma_ss<Element, Config::kChunkColumns>(products, p + step * 2, v + step * 2, step > 0);
        if (chunk == 0) ptx::wgmma_ss<Element, 8>(sums, p + step * 2, ones + step * 2, step > 0);
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      slots.release();
      FFPA_UNROLL
      for (int i = 0; i < Config::kChunkColumns / 2; ++i) out[chunk][i] += products[i] * (part[i / 2 % 2] * scale);
      if (chunk > 0) continue;
      state.rounded[0] += sums[0] * part[0];
      state.rounded[1] += sums[2] * part[1];
    }
    if (lane_ == 0) ptx::mbarrier_arrive(p_empty(maker));  // release() has waited for the other lanes
  }

  // Rescales O to references that are no smaller.
  static FFPA_DEVICE void follow(Chunk (&out)[Config::kChunks], State& state, const float (&references)[2]) {
    const float larger[2] = {larger_of(state.of_out[0], references[0]), larger_of(state.of_out[1], references[1])};
    if (!ptx::vote_any(larger[0] != state.of_out[0] || larger[1] != state.of_out[1])) return;
    FFPA_UNROLL
    for (Chunk& chunk : out) rescale(chunk, state.of_out, larger);
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      state.rounded[h] *= growth(state.of_out[h], larger[h]);
      state.of_out[h] = larger[h];
    }
  }

  // Tells of the largest scores of the warpgroup's keys, and computes what O is to be multiplied with, and the LSE:
  // from the keys of both warpgroups.
  FFPA_DEVICE void finish(float (&factor)[2], State& state, const SharedRowTile& rows, const WarpPlace& at) {
    if (params_.largest != nullptr) {
      const int row = row_of(lane_ % 2, at);
      tell_largest(ptx::mul_rn(state.top, kLn2), params_, rows, row);
    }
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      state.sum[h] = tile::sum_of_lanes(state.sum[h]);
      if (lane_ % 4 == 0) {
        ptx::st_shared_8(sum_of(at.group, row_of(h, at)), {float_bits(state.sum[h]), float_bits(state.reference[h])});
      }
    }
    meet_other_group();
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      uint32_t theirs[2];
      ptx::ld_shared_8(theirs, sum_of(1 - at.group, row_of(h, at)));
      const float sum = state.sum[h] * growth(state.reference[h], state.of_out[h]) +
                        float_from_bits(theirs[0]) * growth(float_from_bits(theirs[1]), state.of_out[h]);
      factor[h] =
          finish_row(params_, rows, row_of(h, at), sink_of(params_, rows, row_of(h, at)), state.of_out[h] - kPExponent,
                     sum, state.rounded[h], at.group == 0 && lane_ % 4 == 0, [](float logit) { return logit * kLn2; });
    }
    meet_other_group();  // both groups have read the sums
  }

  FFPA_DEVICE void write_out(const Chunk (&out)[Config::kChunks], const float (&factor)[2], const SharedRowTile& rows,
                             int group, int row) const {
    if (arguments_.params.output == Fp8Output::kHalf) {
      write_out_as<Half>(out, factor, rows, group, row);
    } else {
      write_out_as<BFloat16>(out, factor, rows, group, row);
    }
  }

  // Writes O as Output, or as floats if these are asked for.
  template <class Output>
  FFPA_DEVICE void write_out_as(const Chunk (&out)[Config::kChunks], const float (&factor)[2],
                                const SharedRowTile& rows, int group, int row) const {
    constexpr int kChunkFragments = Config::kChunkColumns / 8, kFragments = Config::kChunks * kChunkFragments;
    const bool floats = arguments_.params.output == Fp8Output::kFloat;
    const int first = rows.first + row, column = group * Config::kOwnColumns;
    const int64_t offset = rows.batch() * params_.out.batch_stride + rows.head() * params_.out.head_stride +
                           first * params_.out.row_stride + column;
    tile::RowWriter<Output, kFragments> writer(
        {params_.out.data + offset * (floats ? 2 : 1), params_.out.row_stride, rows.last + 1 - first},
        params_.d_v - column, floats, lane_);
    FFPA_UNROLL
    for (int n = 0; n < kFragments; ++n) {
      const float* of = out[n / kChunkFragments] + n % kChunkFragments * 4;
      const float values[4] = {of[0] * factor[0], of[1] * factor[0], of[2] * factor[1], of[3] * factor[1]};
      writer.put(n, values);
    }
  }

  FFPA_DEVICE int row_of(int h, const WarpPlace& at) const { return at.row + tile::c_coordinate(lane_, 2 * h).row; }
  FFPA_DEVICE uint32_t sum_of(int group, int r) const {
    return smem_ + offsetof(Smem, sums) + group * (kRows * 8) + r * 8;
  }

  static FFPA_DEVICE void meet_other_group() { ptx::bar_sync(1, tile::kConsumerGroups * tile::kGroupThreads); }

  FFPA_DEVICE RowScales row_scales(const SharedRowTile& rows) const {
    const int head_kv = rows.head() / params_.group;
    const ScaleView &q = arguments_.params.q_scale, &k = arguments_.params.k_scale, &v = arguments_.params.v_scale;
    const float* q_data = scales_of(q, rows.batch(), rows.head());
    return {scales_of(k, rows.batch(), head_kv), scales_of(v, rows.batch(), head_kv),
            scale_of(q_data, q, rows.first / kScaledRows)};
  }

  static FFPA_DEVICE const float* scales_of(const ScaleView& scales, int batch, int head) {
    if (scales.data == nullptr) return nullptr;
    return scales.data + batch * scales.batch_stride + head * scales.head_stride;
  }

  static FFPA_DEVICE float scale_of(const float* data, const ScaleView& scales, int block) {
    return data == nullptr ? 1.0f : float_from_bits(ptx::ld_global_4(data + block * scales.block_stride));
  }
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void forward_wgmma_fp8(FFPA_GRID_CONSTANT const typename Config::Arguments arguments) {
  ForwardWgmmaFp8<Config>(arguments).run();
}

}  // namespace ffpa
