// Attention forward of 8-bit floats, on wgmma, for head dims whose O the registers of two warpgroups hold. A persistent
// block takes row tiles of kRows rows of one query head. Both warpgroups have all of the rows, and half of the columns
// of O each; of every tile of kKeys keys each computes S of half of the keys, and leaves P, rounded to 8 bits, in
// shared memory for both:
//
//   S = Q Kᵀ of its keys; maxima, and those of the other; P; O += P V of all keys, some of its columns at a time
//
// What keeps it exact: P is scaled up to use the range of its type; a tile's product with V, and its sum of P, are sums
// of their own, added in float (Hopper adds products of 8-bit floats in 14 bits); rows are divided by the sum of the
// rounded P.
//
// A thread has two neighbouring keys of 8 as scores, and 4 bytes of P that are neighbours: of 16 keys 0, 1, 8 and 9,
// the next one 2, 3, 10 and 11. V comes with its keys in that order.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/fp8_params.h"
#include "attention/fused_steps.cuh"
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
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "tile/box_ring.cuh"
#include "tile/fragment_output.cuh"
#include "tile/fragments.cuh"
#include "tile/smem_layout.cuh"

namespace ffpa {

// Fields: Dtype of Q, K and V; kColumns of Q, K, V and O, at most.
template <class Fields>
struct ForwardFp8Config : Fields {
  using Params = Fp8Params;
  static constexpr int kRows = tile::kBox;
  static constexpr int kGroupKeys = tile::kBox, kKeys = tile::kConsumerGroups * kGroupKeys;  // of a tile
  static_assert(kKeys == kScaledRows && kScaledRows % kRows == 0, "a tile has one scale of Q, one of K and one of V");
  static constexpr int kOwnColumns = Fields::kColumns / tile::kConsumerGroups;  // of O
  static constexpr int kChunks = 2, kChunkColumns = kOwnColumns / kChunks;      // of a product with V
  static constexpr int kBoxColumns = 2 * tile::kBox;
  static constexpr int kBoxes = ceil_div(Fields::kColumns, kBoxColumns);        // of a row of Q and K
  static constexpr int kKeyBoxes = 2, kKeyParts = ceil_div(kBoxes, kKeyBoxes);  // of a slot with K; of its tile
  static constexpr uint32_t kChunkBytes = kChunkColumns * tile::kBoxRowBytes;   // of V, all keys of a tile
  static_assert(kChunkBytes % tile::kAtomBytes == 0, "the chunks of both warpgroups are atoms of the swizzle");
  static constexpr int kThreads = tile::kCoreThreads;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // of a thread

  // Shared memory: slots of the ring, as many as fit; Q; P; what P is multiplied with for its sums; barriers of the
  // ring and of Q; for each warpgroup maxima, and sums, of the rows; for each warp the rows in work; the row tiles.
  static constexpr int kConsumerWarps = tile::kConsumerGroups * tile::kGroupWarps;
  using Queries = QueryBoxes<kBoxes, 1>;
  static constexpr uint32_t kPBytes = tile::kBoxBytes, kOnesBytes = tile::kAtomBytes;
  static constexpr uint32_t kMaximaBytes = tile::kConsumerGroups * kRows * 4, kSumsBytes = 2 * kMaximaBytes;
  static constexpr uint32_t kKeptBytes = (1 + kConsumerWarps) * KeptRows::kBytes;
  static constexpr uint32_t kOtherBytes = Queries::kBytes + kPBytes + kOnesBytes + Queries::kBarrierBytes +
                                          kMaximaBytes + kSumsBytes + kKeptBytes + ItemQueue<>::kBytes;
  static constexpr int kSlotBoxes = kKeyBoxes * tile::kConsumerGroups;
  static constexpr uint32_t kMostBytes = 227 * 1024, kSlotBytes = kSlotBoxes * tile::kBoxBytes + 3 * 8;
  static constexpr int kSlots = min_of(int((kMostBytes - kOtherBytes - 16) / kSlotBytes), 8);
  static_assert(tile::kConsumerGroups * kChunkBytes <= kSlotBoxes * tile::kBoxBytes, "a slot holds a chunk of V, too");
  using Ring = tile::BoxRing<0, kSlotBoxes, kSlots>;

  static constexpr uint32_t kQueryAt = Ring::kBytes;
  static constexpr uint32_t kPAt = kQueryAt + Queries::kBytes, kOnesAt = kPAt + kPBytes;
  static constexpr uint32_t kMaximaAt = kOnesAt + kOnesBytes, kSumsAt = kMaximaAt + kMaximaBytes;
  static constexpr uint32_t kBarriersAt = kSumsAt + kSumsBytes;
  static constexpr uint32_t kQueryBarriersAt = kBarriersAt + Ring::kBarrierBytes;
  static constexpr uint32_t kKeptAt = round_up(kQueryBarriersAt + Queries::kBarrierBytes, 16u);
  static constexpr uint32_t kItemsAt = kKeptAt + kKeptBytes;
  static constexpr uint32_t kSmemBytes = kItemsAt + ItemQueue<>::kBytes;
  static_assert(kSmemBytes <= kMostBytes, "what a block has");

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape;
    shape.grid.x = uint32_t(min_of(RowTiles<kRows>(params.attention).count(), params.attention.resident_blocks));
    shape.threads = kThreads;
    shape.smem_bytes = kSmemBytes;
    shape.counter = reinterpret_cast<uint32_t*>(params.attention.scratch);
    return shape;
  }

  struct Arguments {
    Params params;
    RowTiles<kRows> row_tiles;
    ptx::TensorMap q, k, v;
  };

  static LaunchStatus arguments(const Params& params, Arguments& arguments) {
    arguments.params = params;
    arguments.row_tiles = RowTiles<kRows>(params.attention);
    const AttentionParams& attention = params.attention;
    const int heads_kv = attention.heads_q / attention.group;
    const LaunchStatus statuses[] = {map_queries(arguments.q, attention, attention.q, attention.d_qk),
                                     map_keys(arguments.k, attention, attention.k, attention.d_qk),
                                     map_tensor(arguments.v, attention.v, params.arranged_keys, attention.d_v, heads_kv,
                                                attention.batch, kChunkColumns)};
    return first_failure(statuses);
  }
};

template <class Config>
class ForwardFp8 {
  using Element = typename Config::Dtype;
  using Ring = typename Config::Ring;
  using Arguments = typename Config::Arguments;
  static constexpr int kRows = Config::kRows;
  static constexpr int kKeys = Config::kKeys;
  static constexpr int kDepth = 32;                               // of a product
  static constexpr int kBoxSteps = Config::kBoxColumns / kDepth;  // of a box, in products; 32 bytes each
  using Scores = ScoreSums<1>;
  using Chunk = float[Config::kChunkColumns / 2];
  using Sums = float[4];

  // The exponent of what P is at a maximum that is its own reference. References are integers, none below its maximum:
  // this leaves the largest P a little below the largest number.
  static constexpr float kPExponent = std::is_same<Element, E4M3>::value ? 8.75f : 15.75f;

 public:
  FFPA_DEVICE explicit ForwardFp8(const Arguments& arguments)
      : arguments_(arguments),
        params_(arguments.params.attention),
        lane_(ptx::lane_id()),
        warp_(ptx::shfl_idx(ptx::thread_x() / 32, 0)),
        ring_{ptx::dynamic_smem(), ptx::dynamic_smem() + Config::kBarriersAt} {}

  FFPA_DEVICE void run() {
    if (ptx::thread_x() == 0) {
      ItemQueue<>(items_smem()).init(Config::kConsumerWarps);
      queries().init();
      ring_.init();
    }
    if (ptx::thread_x() < Config::kOnesBytes / 16) {
      const uint32_t ones = ptx::pack4<Element>(1, 1, 1, 1);
      ptx::st_shared_16(ring_.slots_smem + Config::kOnesAt + ptx::thread_x() * 16, {ones, ones, ones, ones});
      ptx::fence_proxy_async();
    }
    ptx::sync_block();
    tile::run_roles<Config>(warp_, [&] { produce(); }, [&](int group, int warp) { consume(group, warp); });
  }

 private:
  FFPA_DEVICE KeptRows kept_rows(int warp) const {
    return KeptRows(ring_.slots_smem + Config::kKeptAt + warp * KeptRows::kBytes);
  }
  FFPA_DEVICE uint32_t items_smem() const { return ring_.slots_smem + Config::kItemsAt; }
  FFPA_DEVICE typename Config::Queries queries() const {
    return {ring_.slots_smem + Config::kQueryAt, ring_.slots_smem + Config::kQueryBarriersAt};
  }
  FFPA_DEVICE uint32_t p_smem() const { return ring_.slots_smem + Config::kPAt; }

  static FFPA_DEVICE constexpr int boxes_of_key_part(int part) {
    return min_of(Config::kKeyBoxes, Config::kBoxes - part * Config::kKeyBoxes);
  }

  // ---- the producer's warp ----

  FFPA_DEVICE void produce() const {
    tile::BoxProducer<Ring> producer(ring_, lane_);
    const KeptRows kept = kept_rows(0);
    ItemQueue<> items(items_smem());
    uint32_t parity = 1;
    for_each_row_tile(
        params_, arguments_.row_tiles, kept, lane_, [&] { return items.take(params_.scratch, lane_); },
        [&] {
          const HeadRows rows = kept.get();
          queries().bring(arguments_.q, {rows.first, rows.head(), rows.batch()}, parity);
          parity ^= 1;
          const TileRange tiles = visible_tiles(rows, kKeys);
          const MapPlace place = {0, rows.head() / params_.group, rows.batch()};
          FFPA_NO_UNROLL
          for (int tile = tiles.first; tile < tiles.end; ++tile) {
            bring_keys(producer, place, tile * kKeys);
            bring_values(producer, place, tile * kKeys);
          }
        });
  }

  // Boxes of columns, each of the keys of one warpgroup and then of the other.
  FFPA_DEVICE void bring_keys(tile::BoxProducer<Ring>& producer, const MapPlace& place, int key) const {
    FFPA_NO_UNROLL
    for (int part = 0; part < Config::kKeyParts; ++part) {
      const int boxes = boxes_of_key_part(part) * tile::kConsumerGroups;
      producer.bring(
          [&](uint32_t boxes_smem, uint32_t barrier) {
            for (int box = 0; box < boxes; ++box, boxes_smem += tile::kBoxBytes) {
              const int column = part * Config::kKeyBoxes + box / tile::kConsumerGroups;
              load_box(boxes_smem, arguments_.k, barrier, place, column * tile::kBox,
                       key + box % tile::kConsumerGroups * Config::kGroupKeys);
            }
          },
          boxes);
    }
  }

  // A chunk of the columns of one warpgroup and then of the other, rows of the arranged V.
  FFPA_DEVICE void bring_values(tile::BoxProducer<Ring>& producer, const MapPlace& place, int key) const {
    FFPA_NO_UNROLL
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      producer.bring(
          [&](uint32_t boxes_smem, uint32_t barrier) {
            for (int group = 0; group < tile::kConsumerGroups; ++group, boxes_smem += Config::kChunkBytes) {
              load_box(boxes_smem, arguments_.v, barrier, place, key / 2,
                       group * Config::kOwnColumns + chunk * Config::kChunkColumns);
            }
          },
          tile::kConsumerGroups, Config::kChunkColumns);
    }
  }

  // ---- the warpgroups that multiply ----

  // Of two rows that a thread answers for: RowState, with the exact sums of P of its own keys, and the sums of the
  // rounded P of those of its warpgroup.
  struct State : RowState {
    float rounded[2] = {0, 0};
  };

  FFPA_DEVICE void consume(int group, int group_warp) {
    const int row = group_warp * 16;  // of the warp, in the tile
    const KeptRows kept = kept_rows(1 + group * tile::kGroupWarps + group_warp);
    ItemQueue<> items(items_smem());
    uint32_t parity = 0;
    for_each_row_tile(
        params_, arguments_.row_tiles, kept, lane_, [&] { return items.get(lane_); },
        [&] {
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
          for (int tile = tiles.first; tile < tiles.end; ++tile) {
            Scores scores;
            multiply_queries(scores, group);
            const float before[2] = {state.reference[0], state.reference[1]};
            const bool moved = to_probabilities(scores, kept.get(), group, tile, row, state);
            keep_probabilities(scores, group, row);
            if (moved) {
              FFPA_UNROLL
              for (Chunk& chunk : out) rescale(chunk, before, state.reference);
            }
            add_products(out, state, kept.get(), group, tile);
          }
          queries().release(lane_);
          float factor[2];
          finish(factor, state, kept.get(), group, row);
          write_out(out, factor, kept.get(), group, row);
        });
  }

  // scores = Q Kᵀ of the warpgroup's keys of the next tile.
  FFPA_DEVICE void multiply_queries(Scores& scores, int group) {
    FFPA_UNROLL
    for (int part = 0; part < Config::kKeyParts; ++part) {
      const uint64_t k = next_slot(group * tile::kBoxBytes);
      ptx::wgmma_fence();
      FFPA_UNROLL
      for (int box = 0; box < boxes_of_key_part(part); ++box) {
        const int column_box = part * Config::kKeyBoxes + box;
        const uint64_t q = descriptor(queries().box(column_box, 0));
        FFPA_UNROLL
        for (int step = 0; step < min_of(kBoxSteps, Config::kColumns / kDepth - column_box * kBoxSteps); ++step) {
          using Products = float[tile::kBox / 2];
          ptx::wgmma_ss<Element, tile::kBox>(reinterpret_cast<Products&>(scores), q + step * 2,
                                             k + (box * tile::kConsumerGroups * tile::kBoxBytes + step * kDepth) / 16,
                                             part + box + step > 0);
        }
      }
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    release(Config::kKeyParts);
  }

  // Makes P of raw scores; says whether what there is of O has another reference.
  FFPA_DEVICE bool to_probabilities(Scores& scores, const HeadRows& rows, int group, int tile, int row, State& state) {
    const int key = tile * kKeys + group * Config::kGroupKeys;
    const float scale = scale_of(arguments_.params.q_scale, rows.batch(), rows.head(), rows.first / kScaledRows) *
                        scale_of(arguments_.params.k_scale, rows.batch(), rows.head() / params_.group, tile);
    const bool all_seen = all_rows_see(rows, key, Config::kGroupKeys);
    float factor = params_.score_factor * scale;
    if (!(all_seen && params_.softcap == 0 && factor > 0)) {
      FFPA_UNROLL
      for (int h = 0; h < 2; ++h) for_each_of_row(scores, h, [&](float& score) { score *= scale; });
      scores_to_logits(scores[0], params_, rows, all_seen, rows.first + row, key, lane_);
      factor = 1;
    }
    float maximum[2];
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      maximum[h] = -kInfinity;
      for_each_of_row(scores, h, [&](float& score) { maximum[h] = larger_of(maximum[h], score); });
      maximum[h] = larger_of(maximum[h], ptx::shfl_xor(maximum[h], 1));
      maximum[h] = larger_of(maximum[h], ptx::shfl_xor(maximum[h], 2)) * factor;
      if (lane_ % 4 == 0) ptx::st_shared_4(maxima(group, row_of(h, row)), float_bits(maximum[h]));
    }
    meet_other_group();  // also: it has done with P of the tile before
    bool moved = false;
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      const float theirs = float_from_bits(ptx::ld_shared_4(maxima(1 - group, row_of(h, row))));
      const float before = state.reference[h];
      moved |= state.follow(h, larger_of(maximum[h], theirs), 0);
      state.rounded[h] *= growth(before, state.reference[h]);
      const float offset = kPExponent - finite_reference(state.reference[h]);
      float sum = 0;
      for_each_of_row(scores, h, [&](float& score) {
        score = ptx::ex2(score * factor + offset);
        sum += score;
      });
      state.sum[h] += sum;
    }
    return moved;
  }

  // P of the warpgroup's keys, rounded, to shared memory; then that of all keys is there.
  FFPA_DEVICE void keep_probabilities(const Scores& scores, int group, int row) const {
    constexpr tile::RowLayout kLayout(tile::kBoxRowBytes);
    const auto packed = [&](int i, int h) {  // of 16 keys
      const float (&first)[4] = scores[0][0][2 * i], (&second)[4] = scores[0][0][2 * i + 1];
      return ptx::pack4<Element>(first[2 * h], first[2 * h + 1], second[2 * h], second[2 * h + 1]);
    };
    FFPA_UNROLL
    for (int i = 0; i < Config::kGroupKeys / 16; i += 2) {  // matrices: rows 0 … 7 and 8 … 15 of 16 keys, then the next
      const int chunk = group * Config::kGroupKeys / 16 + i + lane_ / 16;
      ptx::stmatrix_x4(p_smem() + row * tile::kBoxRowBytes + kLayout.offset(lane_ % 16, chunk),
                       {packed(i, 0), packed(i, 1), packed(i + 1, 0), packed(i + 1, 1)});
    }
    ptx::fence_proxy_async();
    meet_other_group();
  }

  // out += P V of all keys of a tile, chunk after chunk, and the sums of P of the warpgroup's keys.
  FFPA_DEVICE void add_products(Chunk (&out)[Config::kChunks], State& state, const HeadRows& rows, int group,
                                int tile) {
    const float scale = scale_of(arguments_.params.v_scale, rows.batch(), rows.head() / params_.group, tile);
    const uint64_t p = descriptor(p_smem());
    FFPA_UNROLL
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      Chunk products;
      Sums sums;
      const uint64_t v = next_slot(group * Config::kChunkBytes);
      ptx::wgmma_fence();
      FFPA_UNROLL
      for (int step = 0; step < kKeys / kDepth; ++step) {
        ptx::wgmma_ss<Element, Config::kChunkColumns>(products, p + step * 2, v + step * 2, step > 0);
      }
      if (chunk == 0) {
        const uint64_t own = descriptor(p_smem() + group * Config::kGroupKeys);
        const uint64_t ones = descriptor(ring_.slots_smem + Config::kOnesAt);
        FFPA_UNROLL
        for (int step = 0; step < Config::kGroupKeys / kDepth; ++step) {
          ptx::wgmma_ss<Element, 8>(sums, own + step * 2, ones, step > 0);
        }
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      release(1);
      FFPA_UNROLL
      for (int i = 0; i < Config::kChunkColumns / 2; ++i) out[chunk][i] += products[i] * scale;
      if (chunk > 0) continue;
      state.rounded[0] += sums[0];
      state.rounded[1] += sums[2];
    }
  }

  // What O is multiplied with, and the LSE: of the keys of both warpgroups.
  FFPA_DEVICE void finish(float (&factor)[2], State& state, const HeadRows& rows, int group, int row) {
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      state.sum[h] += ptx::shfl_xor(state.sum[h], 1);
      state.sum[h] += ptx::shfl_xor(state.sum[h], 2);
      if (lane_ % 4 == 0) {
        ptx::st_shared_8(sums(group, row_of(h, row)), {float_bits(state.sum[h]), float_bits(state.rounded[h])});
      }
    }
    meet_other_group();
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      uint32_t theirs[2];
      ptx::ld_shared_8(theirs, sums(1 - group, row_of(h, row)));
      const bool writes = group == 0 && lane_ % 4 == 0;
      finish_row(params_, rows, rows.first + row_of(h, row), state.reference[h] - kPExponent,
                 state.sum[h] + float_from_bits(theirs[0]), writes);
      const float rounded = state.rounded[h] + float_from_bits(theirs[1]);
      factor[h] = rounded > 0 ? 1 / rounded : 0.0f;
    }
    meet_other_group();  // these sums have been read
  }

  FFPA_DEVICE void write_out(const Chunk (&out)[Config::kChunks], const float (&factor)[2], const HeadRows& rows,
                             int group, int row) const {
    if (arguments_.params.output == Fp8Output::kHalf) {
      write_out_as<Half>(out, factor, rows, group, row);
    } else {
      write_out_as<BFloat16>(out, factor, rows, group, row);
    }
  }

  // Or floats.
  template <class Output>
  FFPA_DEVICE void write_out_as(const Chunk (&out)[Config::kChunks], const float (&factor)[2], const HeadRows& rows,
                                int group, int row) const {
    constexpr int kChunkFragments = Config::kChunkColumns / 8, kFragments = Config::kChunks * kChunkFragments;
    const bool floats = arguments_.params.output == Fp8Output::kFloat;
    const int first = rows.first + row, column = group * Config::kOwnColumns;
    const int64_t offset = rows.batch() * params_.out.batch_stride + rows.head() * params_.out.head_stride +
                           first * params_.out.row_stride + column;
    tile::RowWriter<Output, kFragments> writer(params_.out.data + offset * (floats ? 2 : 1), params_.out.row_stride,
                                               rows.last + 1 - first, params_.d_v - column, floats, lane_);
    FFPA_UNROLL
    for (int n = 0; n < kFragments; ++n) {
      const float* of = out[n / kChunkFragments] + n % kChunkFragments * 4;
      const float values[4] = {of[0] * factor[0], of[1] * factor[0], of[2] * factor[1], of[3] * factor[1]};
      writer.put(n, values);
    }
  }

  // ---- of both warpgroups ----

  FFPA_DEVICE int row_of(int h, int row) const { return row + tile::c_coordinate(lane_, 2 * h).row; }
  FFPA_DEVICE uint32_t maxima(int group, int r) const {
    return ring_.slots_smem + Config::kMaximaAt + (group * kRows + r) * 4;
  }
  FFPA_DEVICE uint32_t sums(int group, int r) const {
    return ring_.slots_smem + Config::kSumsAt + (group * kRows + r) * 8;
  }

  static FFPA_DEVICE void meet_other_group() { ptx::bar_sync(1, tile::kConsumerGroups * tile::kGroupThreads); }

  static FFPA_DEVICE float scale_of(const ScaleView& scales, int batch, int head, int block) {
    if (scales.data == nullptr) return 1;
    const float* scale =
        scales.data + batch * scales.batch_stride + head * scales.head_stride + block * scales.block_stride;
    return float_from_bits(ptx::ld_global_4(scale));
  }

  // The descriptor of what lies at an offset of the next slot, once it has landed.
  FFPA_DEVICE uint64_t next_slot(uint32_t offset) {
    ptx::mbarrier_wait(ring_.full(at_.slot), at_.parity);
    const uint64_t boxes = descriptor(ring_.slot(at_.slot) + offset);
    at_.advance();
    return boxes;
  }

  // Gives back slots, in the order in which they were used.
  FFPA_DEVICE void release(int slots) {
    ptx::sync_warp();
    FFPA_UNROLL
    for (int i = 0; i < slots; ++i) {
      if (lane_ == 0) ptx::mbarrier_arrive(ring_.empty(released_.slot));
      released_.advance();
    }
  }

  static FFPA_DEVICE uint64_t descriptor(uint32_t boxes_smem) {
    return ptx::wgmma_descriptor(boxes_smem, tile::kBoxBytes, tile::kAtomBytes, Swizzle::k128Bytes);
  }

  const Arguments& arguments_;
  const AttentionParams& params_;
  int lane_, warp_;
  Ring ring_;
  tile::RingPosition<Ring> at_, released_;
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void forward_fp8(FFPA_GRID_CONSTANT const typename Config::Arguments arguments) {
  ForwardFp8<Config>(arguments).run();
}

}  // namespace ffpa
