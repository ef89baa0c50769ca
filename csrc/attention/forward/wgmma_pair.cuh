// This is the attention forward on wgmma for head dims whose O fits the registers of two blocks. Two persistent
// blocks, a cluster, take row tiles of kRows rows together, each with all keys that it sees or a part of them. A block
// owns half of O's columns, and computes S for half of the keys of every tile of 2 · 64. In each block, both warpgroups
// have 64 rows each, and send P of their keys to the warpgroup with the same rows in the other block:
//
//   S of its keys of the next tile = Q Kᵀ, and O += P V, with P of its own keys of this tile from registers, are queued
//   together; while the second runs, S becomes P; then O += P V, with P of the other block's keys of this tile from
//   shared memory
//
// Each block has references (softmax.cuh) of its own, and sends them along with P. A block that learns of a larger
// one takes it over; what has a smaller one is scaled down to it, be it O, or P of either block.
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
#include "tile/fragments.cuh"
#include "tile/smem_layout.cuh"
#include "tile/smem_plan.cuh"

namespace ffpa {

// Fields has Dtype; kColumns, the most columns of Q and K, and of V and O up to what registers hold; kPaged, whether
// keys lie in pages.
template <class Fields>
struct ForwardWgmmaPairConfig : Fields {
  using Params = AttentionParams;
  static constexpr int kBlocks = 2;  // blocks of a cluster
  static constexpr int kRows = tile::kConsumerGroups * tile::kBox;
  static constexpr int kBlockKeys = tile::kBox, kKeys = kBlocks * kBlockKeys;
  static constexpr int kOwnColumns = min_of(Fields::kColumns, 512) / kBlocks;  // columns of O in a block
  static constexpr int kBoxes = Fields::kColumns / tile::kBox;                 // boxes of a row of Q and K
  // A slot with K has kKeyBoxes boxes, and a tile of K takes kKeyParts slots. A slot with V has kValueBoxes boxes of
  // kValueRows keys, and the keys of a block take kValueParts slots. Slots are small where a larger Q leaves few.
  static constexpr int kKeyBoxes = Fields::kColumns <= 512 ? 2 : 1, kKeyParts = ceil_div(kBoxes, kKeyBoxes);
  static constexpr int kValueRows = 16 * kKeyBoxes, kValueBoxes = ceil_div(kOwnColumns, tile::kBox);
  static constexpr int kValueParts = kBlockKeys / kValueRows;
  // Keys of V lie box by box; of pages, 16 by 16, and then box by box.
  static constexpr uint32_t kValueBoxBytes = Fields::kPaged ? kPageStepBytes : kValueRows * tile::kBoxRowBytes;
  static constexpr uint32_t kValueStepBytes = Fields::kPaged ? kValueBoxes * kPageStepBytes : 2 * tile::kAtomBytes;
  static_assert(!Fields::kPaged || kOwnColumns % tile::kBox == 0, "copies of pages have whole boxes");
  static constexpr int kProducers = kProducersOfKeys<Fields::kPaged>;
  static_assert(kOwnColumns % 32 == 0 && kOwnColumns <= 256, "an instruction has all of a block's columns");
  static constexpr int kThreads = tile::kCoreThreads;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // registers of a thread

  static constexpr int kReadingWarps =
      kBlocks * (tile::kConsumerWarps + kProducers) - 1;  // of row tiles that one warp takes
  using Stores = tile::RowStores<1>;
  using Queries = QueryBoxes<kBoxes>;
  using Items = ItemQueue<kBlocks>;
  static constexpr uint32_t kWarpPBytes = 16 * tile::kBoxRowBytes, kWarpNoteBytes = 16 * 4;
  static_assert(Stores::kBytes == kWarpPBytes, "O leaves from where P did");
  template <int kSlots>
  struct SmemPlan {
    using Ring = tile::BoxRing<0, kKeyBoxes, kSlots>;
    tile::SmemSlots<Ring> slots;
    tile::SmemBytes<Queries::kBytes> q;
    tile::SmemBytes<kWarpPBytes> sent_p[tile::kConsumerWarps];  // P for the other block, or O on its way
    tile::SmemBytes<kWarpPBytes> p[tile::kConsumerWarps];       // P from the other block
    tile::SmemBytes<kWarpNoteBytes> sent_notes[tile::kConsumerWarps], notes[tile::kConsumerWarps];
    tile::SmemBarriers<Ring::kBarrierBytes> ring_barriers;
    tile::SmemBarriers<Queries::kBarrierBytes> q_barriers;
    tile::SmemBarriers<2 * tile::kConsumerGroups * 8> message_barriers;
    tile::SmemBytes<KeptRows::kBytes> kept[kProducers + tile::kConsumerWarps];
    tile::SmemBytes<Items::kBytes> items;
  };
  using Smem = SmemPlan<tile::most_slots<SmemPlan, 8>()>;
  using Ring = typename Smem::Ring;
  static_assert(kValueBoxes * kValueRows * tile::kBoxRowBytes <= Ring::kSlotBytes, "a slot holds a part of V, too");

  static LaunchShape launch_shape(const Params& params) {
    return persistent_shape(RowTiles<kRows>(params).count(), params.resident_blocks, kThreads, sizeof(Smem),
                            reinterpret_cast<uint32_t*>(params.scratch), kBlocks);
  }

  using Arguments = std::conditional_t<Fields::kPaged, PagedForwardArguments<kRows, kValueBoxes>,
                                       WgmmaForwardArguments<kRows, kValueRows>>;
};

template <class Config>
class ForwardWgmmaPair : WgmmaBlock<Config> {
  using Base = WgmmaBlock<Config>;
  using Base::arguments_, Base::params_, Base::lane_, Base::warp_, Base::smem_;
  using Base::ring, Base::kept_rows, Base::item_queue, Base::queries, Base::take_item, Base::bring_row_tiles;
  using Element = typename Config::Dtype;
  using Ring = typename Config::Ring;
  using Smem = typename Config::Smem;
  static constexpr int kRows = Config::kRows;
  static constexpr int kKeys = Config::kKeys;
  static constexpr int kOwnColumns = Config::kOwnColumns;
  using Scores = ScoreSums<1>;
  using Mask = std::conditional_t<Config::kPaged, NoMaskAhead, MaskAhead<1, tile::kBox / 8>>;
  using Probabilities = PackedProbabilities<1>;
  using Out = float[kOwnColumns / 2];
  using Producer = tile::BoxProducer<Ring, Config::kProducers>;

 public:
  FFPA_DEVICE explicit ForwardWgmmaPair(const typename Config::Arguments& arguments)
      : Base(arguments, arguments.params), rank_(ptx::cluster_rank()), slots_(ring(), lane_) {}

  FFPA_DEVICE void run() {
    Base::begin([&] {
      item_queue().init(Config::kReadingWarps);
      queries().init();
      for (int group = 0; group < tile::kConsumerGroups; ++group) {
        ptx::mbarrier_init(message_full(group), 1);
        ptx::mbarrier_init(message_empty(group), tile::kGroupWarps);
      }
      ring().init(Config::kProducers);
    });
    tile::meet_cluster();
    Base::run_roles([&](int producer) { produce(producer); }, [&](int group, int warp) { consume(group, warp); });
    tile::meet_cluster();  // no block ends while the other still copies or arrives there
  }

 private:
  // message_full() says that a message of the other block is there, message_empty() that it has read the last one.
  FFPA_DEVICE uint32_t message_full(int group) const { return smem_ + offsetof(Smem, message_barriers) + group * 8; }
  FFPA_DEVICE uint32_t message_empty(int group) const { return message_full(tile::kConsumerGroups + group); }

  // Returns the first of the keys of a tile that a block has S of.
  static FFPA_DEVICE int first_key(int tile, int rank) { return tile * kKeys + rank * Config::kBlockKeys; }

  static FFPA_DEVICE constexpr int boxes_of_key_part(int part) {
    return min_of(Config::kKeyBoxes, Config::kBoxes - part * Config::kKeyBoxes);
  }

  // ---- the warps that produce ----

  FFPA_DEVICE void produce(int warp) const {
    Producer producer(ring(), lane_, warp);
    auto items = item_queue();
    const auto next_item = [&] {
      if (warp > 0) return items.get(lane_);
      if (rank_ == 0) {
        return take_item(items, params_.scratch,
                         [&](const SharedRowTile& rows) { return !visible_part(rows, kKeys, params_).is_empty(); });
      }
      items.expect(lane_);
      return items.get(lane_);
    };
    bring_row_tiles(warp, next_item, [&](const SharedRowTile& rows, auto& keys) {
      const TileRange tiles = visible_part(rows, kKeys, params_);
      const int n_k = rows.n_k();
      FFPA_NO_UNROLL
      for (int tile = tiles.first; tile <= tiles.end; ++tile) {
        if (tile < tiles.end) bring_keys(producer, keys, first_key(tile, rank_));
        if (tile == tiles.first) continue;
        bring_values(producer, keys, first_key(tile - 1, rank_), n_k);
        bring_values(producer, keys, first_key(tile - 1, 1 - rank_), n_k);
      }
    });
  }

  template <class Keys>
  FFPA_DEVICE void bring_keys(Producer& producer, Keys& keys, int key) const {
    const auto runs = keys.find(key);
    FFPA_NO_UNROLL
    for (int part = 0; part < Config::kKeyParts; ++part) {
      const int boxes = boxes_of_key_part(part);
      producer.bring(keys.keys(arguments_.k, part * Config::kKeyBoxes * tile::kBox, boxes, runs), boxes);
    }
  }

  // Brings V, in the block's own columns; rows from `end` on become zeros.
  template <class Keys>
  FFPA_DEVICE void bring_values(Producer& producer, Keys& keys, int first_key, int end) const {
    constexpr int kBoxes = Config::kValueBoxes, kValueRows = Config::kValueRows;
    FFPA_NO_UNROLL
    for (int key = first_key; key < first_key + Config::kBlockKeys; key += kValueRows) {
      producer.template bring_live_rows<Keys::kTogether>(
          keys.live_rows(key, end),
          keys.values(arguments_.v, rank_ * kOwnColumns, kBoxes, keys.template find<kValueRows>(key)), kBoxes,
          kValueRows);
    }
  }

  // ---- the warpgroups that multiply ----

  // A warp's place, and what shared memory has of its 16 rows: P and a note for each, for the other block and from it.
  struct WarpPlace {
    int warp;
    uint32_t smem;

    FFPA_DEVICE int group() const { return warp / tile::kGroupWarps; }
    FFPA_DEVICE int row() const { return warp * 16; }  // first row in the tile
    FFPA_DEVICE uint32_t sent_p() const { return smem + offsetof(Smem, sent_p) + warp * Config::kWarpPBytes; }
    FFPA_DEVICE uint32_t p() const { return smem + offsetof(Smem, p) + warp * Config::kWarpPBytes; }
    FFPA_DEVICE uint32_t sent_notes() const {
      return smem + offsetof(Smem, sent_notes) + warp * Config::kWarpNoteBytes;
    }
    FFPA_DEVICE uint32_t notes() const { return smem + offsetof(Smem, notes) + warp * Config::kWarpNoteBytes; }
  };

  FFPA_DEVICE void consume(int group, int group_warp) {
    const WarpPlace at = {group * tile::kGroupWarps + group_warp, smem_};
    typename Config::Stores stores(at.sent_p(), lane_);
    const KeptRows kept = kept_rows(Config::kProducers + at.warp);
    auto items = item_queue();
    uint32_t parity = 0;
    const bool mask_in_pairs = !Config::kPaged && has_mask_pairs(params_.mask);
    for_each_row_tile(
        params_, arguments_.row_tiles, kept, lane_, [&] { return items.get(lane_); },
        [&] {
          RowState state;
          Out out;
          float of_out[2] = {-kInfinity, -kInfinity};  // references of O
          FFPA_UNROLL
          for (int i = 0; i < kOwnColumns / 2; ++i) out[i] = 0;
          ptx::mbarrier_wait(queries().full(), parity);
          parity ^= 1;
          const TileRange tiles = visible_part(kept.get(), kKeys, params_);
          if (!has_row(kept.get(), at.group() * tile::kBox)) {  // nor has the warpgroup of the other block
            slots_.pass((tiles.end - tiles.first) * (Config::kKeyParts + 2 * Config::kValueParts));
            queries().release(lane_);
            return;
          }
          if (tiles.first < tiles.end) {
            Scores scores;
            Probabilities p;
            float late[2];
            Mask mask(mask_in_pairs, params_.mask, kept.get(), at.row(), lane_);
            queue_scores(scores);
            mask.load(first_key(tiles.first, rank_));
            ptx::wgmma_wait_group<0>();
            slots_.release();
            to_probabilities<kRulesOf<Config::kPaged>>(scores, params_, kept, first_key(tiles.first, rank_), at.row(),
                                                       state, lane_, mask);
            pack_probabilities<Element>(p, scores);
            FFPA_NO_UNROLL
            for (int tile = tiles.first + 1; tile < tiles.end; ++tile) {
              follow(out, of_out, state.reference);
              queue_scores(scores);
              send_probabilities(at, p, state);
              queue_own_product(out, p);
              mask.load(first_key(tile, rank_));
              ptx::wgmma_wait_group<1>();
              slots_.release();
              to_probabilities<kRulesOf<Config::kPaged>>(scores, params_, kept, first_key(tile, rank_), at.row(), state,
                                                         lane_, mask);
              ptx::wgmma_wait_group<0>();
              slots_.release(Config::kValueParts);
              meet_references(at, out, of_out, state, late);
              queue_their_product(out, at.group());
              lower(scores, late);
              pack_probabilities<Element>(p, scores);
              ptx::wgmma_wait_group<0>();
              slots_.release(Config::kValueParts);
              acknowledge(at.group());
            }
            queries().release(lane_);
            follow(out, of_out, state.reference);
            send_probabilities(at, p, state);
            queue_own_product(out, p);
            ptx::wgmma_wait_group<0>();
            slots_.release(Config::kValueParts);
            meet_references(at, out, of_out, state, late);
            queue_their_product(out, at.group());
            ptx::wgmma_wait_group<0>();
            slots_.release(Config::kValueParts);
            acknowledge(at.group());
          } else {
            queries().release(lane_);
          }
          finish(at, kept.get(), state);
          if (params_.splits > 1 && tiles.first == tiles.end) return;  // nobody reads O of a part without keys
          // The other block has acknowledged P, and so has read it: rows of O may take its place.
          write_out<Element>(out, stores, arguments_.out, params_, kept.get(), at.row(), rank_ * kOwnColumns, state.sum,
                             lane_);
        });
    stores.wait();
  }

  // Queues scores = Q Kᵀ of the block's keys of the next tile, by parts; the last part, its own group, may still run.
  FFPA_DEVICE void queue_scores(Scores& scores) {
    const int group = tile::consumer_group_anew();  // places of Q that were found once would wait in spilled registers
    FFPA_UNROLL
    for (int part = 0; part < Config::kKeyParts; ++part) {
      const uint64_t k = slots_.next();
      ptx::wgmma_fence();
      add_scores<Element>(scores[0], queries(), part * Config::kKeyBoxes, boxes_of_key_part(part), group, k, part > 0);
      ptx::wgmma_commit_group();
      if (part == 0) continue;
      ptx::wgmma_wait_group<1>();
      slots_.release();
    }
  }

  // Queues out += P V of the block's own keys, as a group of its own.
  FFPA_DEVICE void queue_own_product(Out& out, const Probabilities& p) {
    queue_product(
        [&](int step, uint64_t v) { ptx::wgmma_rs<Element, kOwnColumns, tile::Major::kMN>(out, p[step], v, true); });
  }

  // Queues out += P V of the other block's keys, as a group of its own.
  FFPA_DEVICE void queue_their_product(Out& out, int group) {
    const uint64_t p =
        tile::boxes_descriptor(smem_ + offsetof(Smem, p) + group * tile::kGroupWarps * Config::kWarpPBytes);
    queue_product([&](int step, uint64_t v) {
      ptx::wgmma_ss<Element, kOwnColumns, tile::Major::kK, tile::Major::kMN>(out, p + step * 2, v, true);
    });
  }

  // Calls multiply(step, v) for each 16 of the 64 keys of the next slots.
  template <class Multiply>
  FFPA_DEVICE void queue_product(const Multiply& multiply) {
    constexpr int kSteps = Config::kValueRows / 16;
    FFPA_UNROLL
    for (int part = 0; part < Config::kValueParts; ++part) {
      const uint64_t v = slots_.next(Config::kValueBoxBytes);
      ptx::wgmma_fence();
      FFPA_UNROLL
      for (int step = 0; step < kSteps; ++step) multiply(part * kSteps + step, v + step * Config::kValueStepBytes / 16);
    }
    ptx::wgmma_commit_group();
  }

  // ---- messages between the blocks: one sent, one received, each read before the next one comes ----

  FFPA_DEVICE void send_probabilities(const WarpPlace& at, const Probabilities& p, const RowState& state) {
    constexpr tile::RowLayout kLayout(tile::kBoxRowBytes);
    if (lane_ == 0) ptx::bulk_wait_group_read<0>();  // rows of O of the row tile before have left
    wait_until_read(at.group());
    FFPA_UNROLL
    for (int i = 0; i < tile::kBox / 16; ++i) {
      ptx::stmatrix_x4(at.sent_p() + kLayout.offset(lane_ % 16, 2 * i + lane_ / 16),
                       {p[i][0], p[i][1], p[i][2], p[i][3]});
    }
    send(at, state.reference, Config::kWarpPBytes);
  }

  // Waits until the other block has read all messages before.
  FFPA_DEVICE void wait_until_read(int group) const {
    ptx::mbarrier_wait(message_empty(group), (messages_ & 1) ^ 1);
    ptx::sync_warp();
  }

  // Sends `p_bytes` bytes of P, and a note for each row.
  FFPA_DEVICE void send(const WarpPlace& at, const float (&notes)[2], uint32_t p_bytes) const {
    for_each_half(lane_, [&](int h, int r) {
      if (lane_ % 4 == 0) ptx::st_shared_4(at.sent_notes() + r * 4, float_bits(notes[h]));
    });
    ptx::fence_proxy_async();
    ptx::sync_warp();
    if (ptx::elect_one()) {
      const uint32_t full = message_full(at.group());
      if (p_bytes > 0) ptx::copy_to_block(at.p(), at.sent_p(), p_bytes, full, 1 - rank_);
      ptx::copy_to_block(at.notes(), at.sent_notes(), Config::kWarpNoteBytes, full, 1 - rank_);
    }
    ptx::sync_warp();
  }

  // Waits for the next message, in which each warp has `warp_bytes` bytes.
  FFPA_DEVICE void receive(const WarpPlace& at, uint32_t warp_bytes) {
    if (at.warp % tile::kGroupWarps == 0 && lane_ == 0) {
      ptx::mbarrier_arrive_expect_tx(message_full(at.group()), tile::kGroupWarps * warp_bytes);
    }
    ptx::mbarrier_wait(message_full(at.group()), messages_ & 1);
    ++messages_;
  }

  static FFPA_DEVICE float note(const WarpPlace& at, int r) {
    return float_from_bits(ptx::ld_shared_4(at.notes() + r * 4));
  }

  // Tells the other block that its message has been read: the next one may come.
  FFPA_DEVICE void acknowledge(int group) const {
    ptx::sync_warp();
    if (lane_ == 0) ptx::mbarrier_arrive_remote(message_empty(group), 1 - rank_);
  }

  // Receives P of the other block's keys, and makes O and this P refer to the larger reference of both. `late` becomes
  // what P of the block's next keys, computed before the message came, has to be multiplied with.
  FFPA_DEVICE void meet_references(const WarpPlace& at, Out& out, float (&of_out)[2], RowState& state,
                                   float (&late)[2]) {
    receive(at, Config::kWarpPBytes + Config::kWarpNoteBytes);
    float theirs[2], larger[2];
    for_each_half(lane_, [&](int h, int r) {
      theirs[h] = note(at, r);
      larger[h] = larger_of(of_out[h], theirs[h]);
      late[h] = 1;
      if (theirs[h] > state.reference[h]) {
        late[h] = growth(state.reference[h], theirs[h]);
        state.sum[h] *= late[h];
        state.reference[h] = theirs[h];
      }
    });
    follow(out, of_out, larger);
    lower_their_p(at, theirs, larger);
  }

  // Scales down, in its place, P that came with smaller references than O has.
  FFPA_DEVICE void lower_their_p(const WarpPlace& at, const float (&theirs)[2], const float (&references)[2]) const {
    const bool lower[2] = {theirs[0] != references[0] && theirs[0] != -kInfinity,
                           theirs[1] != references[1] && theirs[1] != -kInfinity};
    if (ptx::vote_any(lower[0] || lower[1])) {
      constexpr tile::RowLayout kLayout(tile::kBoxRowBytes);
      for_each_half(lane_, [&](int h, int r) {
        if (!lower[h]) return;
        const float factor = growth(theirs[h], references[h]);
        FFPA_NO_UNROLL
        for (int i = 0; i < 2; ++i) {
          uint32_t pairs[4];
          // Neighbouring rows take different chunks at a time: the same ones lie in the same banks.
          const uint32_t smem = at.p() + kLayout.offset(r, lane_ % 4 + (i + r) % 2 * 4);
          ptx::ld_shared_16(pairs, smem);
          FFPA_UNROLL
          for (uint32_t& pair : pairs) {
            float low, high;
            ptx::unpack<Element>(pair, low, high);
            pair = ptx::pack<Element>(low * factor, high * factor);
          }
          ptx::st_shared_16(smem, {pairs[0], pairs[1], pairs[2], pairs[3]});
        }
      });
      ptx::fence_proxy_async();
    }
    ptx::bar_sync(1 + at.group(), tile::kGroupThreads);  // the product reads the rows of all its warps
  }

  static FFPA_DEVICE void lower(Scores& scores, const float (&factor)[2]) {
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) for_each_of_row(scores, h, [&](float& score) { score *= factor[h]; });
  }

  // Tells of the largest scores, and replaces the sums by what O is to be multiplied with. The blocks have exchanged
  // the references of the last tile: both have the same.
  FFPA_DEVICE void finish(const WarpPlace& at, const SharedRowTile& rows, RowState& state) {
    tell_if_asked(state, params_, rows, at.row());
    FFPA_UNROLL
    for (float& sum : state.sum) sum = tile::sum_of_lanes(sum);
    wait_until_read(at.group());
    send(at, state.sum, 0);
    receive(at, Config::kWarpNoteBytes);
    for_each_half(lane_, [&](int h, int r) {
      const bool writes = rank_ == 0 && lane_ % 4 == 0;
      state.sum[h] = finish_row(params_, rows, at.row() + r, sink_of(params_, rows, at.row() + r), state.reference[h],
                                state.sum[h] + note(at, r), writes);
    });
    acknowledge(at.group());
  }

  int rank_;
  tile::SlotReader<Ring> slots_;
  uint32_t messages_ = 0;  // messages sent, and as many received
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void forward_wgmma_pair(FFPA_GRID_CONSTANT const typename Config::Arguments arguments) {
  ForwardWgmmaPair<Config>(arguments).run();
}

}  // namespace ffpa
