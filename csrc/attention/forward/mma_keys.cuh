// Attention forward of few rows on 8-bit keys in pages, on mma.sync, where warps own keys. A block has a row tile of
// kRows rows; of each tile of kKeys keys every warp has kWarpKeys, for all rows and all columns:
//
//   1. S = Q Kᵀ      in steps of kColumns columns of the head dim
//   2. softmax       of the warp's keys alone: P stays in registers
//   3. O = αO + P V
//
// Each warp brings its own keys and values, through a ring of its own, and so waits for no other once Q is there: they
// read memory all the time. In the end O of all warps is added up in shared memory, in their order.
//
// d_qk is a loop count; registers hold O, so that d_v ≤ kColumns.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/params/attention_params.h"
#include "attention/rows/item_grid.cuh"
#include "attention/rows/paged_copy.cuh"
#include "attention/rows/row_tile.cuh"
#include "attention/rows/row_tiles.cuh"
#include "attention/softmax.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/e4m3_fragments.cuh"
#include "tile/fragments.cuh"
#include "tile/kept_value.cuh"
#include "tile/multiply.cuh"
#include "tile/smem_layout.cuh"
#include "tile/stage_ring.cuh"

namespace ffpa {

// Fields has Dtype, that of Q; kColumns; kRows and kKeys of a tile.
template <class Fields>
struct ForwardMmaKeysConfig : Fields {
  using Params = AttentionParams;
  using Fields::kColumns;
  using Fields::kKeys;
  using Fields::kRows;
  static constexpr int kWarpKeys = 32;  // depths of two products with V, whose 8-bit fragments are loaded together
  static constexpr int kWarps = kKeys / kWarpKeys;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kMinBlocksPerSm = 12 / kWarps;  // with 168 registers for each thread
  static_assert(kRows == 16, "a warp has all rows of a fragment");
  static_assert(kColumns % (16 * kWarps) == 0 && kColumns % 64 == 0, "warps write pairs of fragments of O");

  // Shared memory holds the slots of all warps, in the end O of each; Q; barriers; what warps tell each other of rows;
  // the row tile, and where its keys lie.
  using Layout = tile::RowLayout;
  FFPA_HOST_DEVICE static constexpr Layout query_layout() { return Layout(kColumns * 2); }  // of one step
  FFPA_HOST_DEVICE static constexpr Layout key_layout() { return Layout(kColumns); }
  static constexpr uint32_t kSlotBytes = key_layout().bytes(kWarpKeys);
  static constexpr uint32_t kQueryStepBytes = query_layout().bytes(kRows);
  static constexpr uint32_t kOutBytes = kRows * kColumns * sizeof(float);  // of one warp
  static constexpr uint32_t kNoteBytes = kRows * sizeof(float);
  using Ring = tile::StageRing<32>;
  using KeptKeys = tile::KeptValue<PagedKeysInGmem>;

  FFPA_HOST_DEVICE static int key_steps(const Params& params) { return ceil_div(params.d_qk, kColumns); }
  FFPA_HOST_DEVICE static uint32_t slots_bytes(const Params& params) {
    return kWarps * max_of(params.stages * kSlotBytes, kOutBytes);
  }
  static uint32_t smem_bytes(const Params& params) {
    return slots_bytes(params) + key_steps(params) * kQueryStepBytes + kWarps * (Ring::kBarrierBytes + 2 * kNoteBytes) +
           KeptRows::kBytes + KeptKeys::kBytes;
  }

  using Arguments = PagedRowTileArguments<kRows>;

  static LaunchShape launch_shape(const Params& params) {
    return {grid_of(params, RowTiles<kRows>(params).count()), kThreads, smem_bytes(params)};
  }
};

template <class Config>
class ForwardMmaKeys {
  using Element = typename Config::Dtype;
  static constexpr int kRows = Config::kRows, kKeys = Config::kKeys, kColumns = Config::kColumns;
  static constexpr int kWarps = Config::kWarps, kWarpKeys = Config::kWarpKeys;
  static constexpr int kScoreN = kWarpKeys / 8;                       // fragments of a warp's S
  static constexpr int kRuns = kWarpKeys / kPageStep;                 // of a warp in a tile: they lie together
  static constexpr int kKnownTiles = 32 / kRuns;                      // a lane knows where one run lies
  static constexpr int kOutN = kColumns / 8, kOwnN = kOutN / kWarps;  // fragments of O; those that a warp writes
  static constexpr int kGroupN = 8, kDepthsAtOnce = 2;  // fragments and depths whose bytes are loaded together
  using Scores = float[1][1][kScoreN][4];
  using Probabilities = uint32_t[kWarpKeys / 16][4];
  using Out = tile::Accumulator<float>[kOutN / kGroupN][1][kGroupN];

 public:
  FFPA_DEVICE explicit ForwardMmaKeys(const typename Config::Arguments& arguments)
      : arguments_(arguments),
        params_(arguments.params),
        lane_(ptx::lane_id()),
        warp_(ptx::shfl_idx(ptx::thread_x() / 32, 0)),
        q_smem_(ptx::dynamic_smem() + Config::slots_bytes(params_)),
        notes_smem_(q_smem_ + Config::key_steps(params_) * Config::kQueryStepBytes +
                    kWarps * Config::Ring::kBarrierBytes),
        rows_(notes_smem_ + 2 * kWarps * Config::kNoteBytes),
        keys_(notes_smem_ + 2 * kWarps * Config::kNoteBytes + KeptRows::kBytes),
        ring_(notes_smem_ - (kWarps - warp_) * Config::Ring::kBarrierBytes,
              ptx::dynamic_smem() + warp_ * params_.stages * Config::kSlotBytes, params_.stages, Config::kSlotBytes) {}

  FFPA_DEVICE void run() {
    const int item = arguments_.row_tiles.heads_before_parts(block_number());
    const SharedRowTile rows = arguments_.row_tiles.get(params_, item, [&](const SharedRowTile& of_item) {
      arguments_.key_pages.prefetch(params_.paged, of_item.batch_index, of_item.part * params_.part_keys);
    });
    const TileRange tiles = visible_part(rows, kKeys, params_);
    if (params_.splits > 1 && tiles.first == tiles.end) {  // nobody reads O of a part without keys
      if (warp_ == 0) finish_rows(params_, rows, 0, state_, lane_);
      return;
    }
    begin(rows, tiles);
    Out out;
    FFPA_NO_UNROLL
    for (int tile = first_tile_; tile < end_tile_; ++tile) {
      Probabilities p;
      attend_to(tile, p, out);
      add_values(out, p);
    }
    add_up(out);
  }

 private:
  FFPA_DEVICE void begin(const SharedRowTile& rows, const TileRange& tiles) {
    if (warp_ == 0) {
      rows_.keep(rows, lane_);
      keys_.keep(mma_keys<true>(params_, rows), lane_);
    }
    ring_.init(lane_);
    ptx::sync_block();  // the row tile is there, and the barriers of the rings are

    const int seen = keys_.get().seen.end - warp_ * kWarpKeys;  // keys from the warp's first one on
    first_tile_ = next_tile_ = tiles.first;
    end_tile_ = min_of(tiles.end, ceil_div(max_of(seen, 0), kKeys));
    if (tiles.first == tiles.end) return;

    const KeyScales scales = scales_of_head(params_, rows);
    const int thread = warp_ * 32 + lane_, key_steps = Config::key_steps(params_);
    FFPA_NO_UNROLL
    for (int step = 0; step < key_steps; ++step) {
      copy_queries_async<kRows, kColumns, Config::kThreads>(
          q_smem_ + step * Config::kQueryStepBytes, Config::query_layout(), params_, rows, step * kColumns, thread);
    }
    ptx::cp_async_commit_group();
    page_ahead_ = look_up(first_tile_);
    know(first_tile_);
    for (int ahead = 1; ahead < params_.stages; ++ahead) bring_next_step();

    ptx::cp_async_wait_group<0>();  // Q alone is in a group
    ptx::sync_block();
    constexpr int kPairs = kColumns / 16;  // two chunks of Q each, in a step
    const auto chunks_of = [&](int row, int pair, uint32_t (&addresses)[2]) {
      const uint32_t step_smem = q_smem_ + pair / kPairs * Config::kQueryStepBytes;
      FFPA_UNROLL
      for (int i = 0; i < 2; ++i) addresses[i] = step_smem + Config::query_layout().offset(row, pair % kPairs * 2 + i);
    };
    tile::prepare_rows<Element, kRows, kWarps>(rows.count(), key_steps * kPairs, chunks_of, scales.k, notes_smem_,
                                               thread);
    ptx::sync_block();
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) key_scale_[h] = note(0, row_of_lane(h));
    value_scale_ = scales.v;
  }

  // ---- keys and values of the warp, on their way into shared memory ----

  // Starts the copies of the warp's next step, if there is one: columns of K, in the end V.
  FFPA_DEVICE void bring_next_step() {
    if (next_tile_ >= end_tile_) return;
    const bool of_keys = next_step_ < Config::key_steps(params_);
    const PagedKeysInGmem keys = keys_.get();
    PagedWindow window = of_keys ? window_of_k(params_, keys) : window_of_v(params_, keys);
    window.columns /= 2;  // elements of 16 bits have two of 8
    copy_paged_keys_async<kWarpKeys, kColumns / 2, 32>(
        ring_.begin_fill(), Config::key_layout(), window, of_keys ? k_of_lane_ : v_of_lane_,
        (next_tile_ - known_tile_) * kRuns, next_tile_ * kKeys + warp_ * kWarpKeys,
        of_keys ? next_step_ * (kColumns / 2) : 0, lane_);
    ring_.end_fill();
    if (of_keys) {
      ++next_step_;
      return;
    }
    next_step_ = 0;
    if (++next_tile_ == known_tile_ + kKnownTiles && next_tile_ < end_tile_) know(next_tile_);
  }

  // Makes sure that lanes know where the warp's runs of kKnownTiles tiles lie, and looks up the pages of those after.
  FFPA_DEVICE void know(int tile) {
    const PagedKeysInGmem keys = keys_.get();
    const int key = run_of_lane_from(tile);
    k_of_lane_ =
        run_of_lane(arguments_.key_pages, params_.paged, keys, window_of_k(params_, keys), page_ahead_, key, 0);
    v_of_lane_ =
        run_of_lane(arguments_.key_pages, params_.paged, keys, window_of_v(params_, keys), page_ahead_, key, 0);
    page_ahead_ = look_up(tile + kKnownTiles);
    known_tile_ = tile;
  }
  FFPA_DEVICE int look_up(int tile) const {
    const PagedKeysInGmem keys = keys_.get();
    return arguments_.key_pages.look_up(params_.paged, keys.place(), keys.seen, run_of_lane_from(tile));
  }
  // Returns the first key of the lane's run, of those from a tile on. There is one tile behind the last, at most:
  // numbers of keys further on may be more than an int holds.
  FFPA_DEVICE int run_of_lane_from(int tile) const {
    const int of_lane = min_of(tile + lane_ / kRuns, end_tile_);
    return of_lane * kKeys + warp_ * kWarpKeys + lane_ % kRuns * kPageStep;
  }

  // ---- 1., 2. S = Q Kᵀ, softmax ----

  // Makes P of the tile; O so far follows its references.
  FFPA_DEVICE void attend_to(int tile, Probabilities& p, Out& out) {
    Scores scores;
    compute_scores(scores[0]);
    const float before[2] = {state_.reference[0], state_.reference[1]};
    const int key = tile * kKeys + warp_ * kWarpKeys;
    const bool moved = to_probabilities<Rules::kInFewRegisters, false>(scores, params_, rows_, key, 0, state_, lane_);
    if (ptx::vote_any(moved)) {
      const float factors[2] = {growth(before[0], state_.reference[0]), growth(before[1], state_.reference[1])};
      FFPA_UNROLL
      for (int n = 0; n < kOutN; ++n) tile::scale_rows(out[n / kGroupN][0][n % kGroupN], factors);
    }
    pack_probabilities<Half>(p, scores);
  }

  FFPA_DEVICE void compute_scores(float (&scores)[1][kScoreN][4]) {
    tile::Accumulator<float> s[1][kScoreN];
    const tile::Coordinate a = tile::ldmatrix_a(lane_), b = tile::ldmatrix_b_pair(lane_);
    uint32_t of_a = q_smem_ + Config::query_layout().offset(a.row, a.column);
    const int key_steps = Config::key_steps(params_);
    FFPA_NO_UNROLL
    for (int step = 0; step < key_steps; ++step, of_a += Config::kQueryStepBytes) {
      bring_next_step();
      const uint32_t of_b = ring_.begin_use() + Config::key_layout().offset(b.row, b.column);
      FFPA_UNROLL
      for (int first = 0; first < kColumns / 16; first += kDepthsAtOnce) {
        tile::add_product_of_e4m3<false, kDepthsAtOnce>(
            s,
            [&](uint32_t (&fragment)[4], int, int depth) {
              ptx::ldmatrix_x4(fragment, Config::query_layout().moved(of_a, 0, (first + depth) * 2));
            },
            [&](uint32_t (&bytes)[4], int depths, int pair) {  // a chunk is a depth
              ptx::ldmatrix_x4(bytes, Config::key_layout().moved(of_b, pair * 16, first + depths * 2));
            });
      }
      ring_.end_use();
    }
    FFPA_UNROLL
    for (int n = 0; n < kScoreN; ++n) {
      s[0][n].get(scores[0][n]);
      tile::scale_rows(scores[0][n], key_scale_);
    }
  }

  // ---- 3. O = αO + P V ----

  FFPA_DEVICE void add_values(Out& out, const Probabilities& p) {
    bring_next_step();
    const uint32_t v_smem = ring_.begin_use();
    FFPA_UNROLL
    for (int group = 0; group < kOutN / kGroupN; ++group) {
      tile::add_product_of_e4m3<true, kWarpKeys / 16>(
          out[group],
          [&](uint32_t (&fragment)[4], int, int depth) {
            FFPA_UNROLL
            for (int r = 0; r < 4; ++r) fragment[r] = p[depth][r];
          },
          [&](uint32_t (&bytes)[4], int, int pair) {  // a chunk has the columns of a pair
            const int chunk = group * (kGroupN / 2) + pair;
            ptx::ldmatrix_x4_trans(bytes, v_smem + Config::key_layout().offset(lane_, chunk));
          });
    }
    ring_.end_use();
  }

  // ---- out = sum of all warps' O / row sum, LSE ----

  FFPA_DEVICE void add_up(const Out& out) {
    const SharedRowTile rows = rows_.get();
    tell_if_asked(state_, params_, rows, 0);
    ptx::sync_block();  // nobody reads slots, or factors of Q, any more
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      const float sum = tile::sum_of_lanes(state_.sum[h]);
      if (lane_ % 4 != 0) continue;
      ptx::st_shared_4(note_smem(warp_, row_of_lane(h)), float_bits(state_.reference[h]));
      ptx::st_shared_4(note_smem(kWarps + warp_, row_of_lane(h)), float_bits(sum));
    }
    FFPA_UNROLL
    for (int n = 0; n < kOutN; ++n) {
      const float (&c)[4] = out[n / kGroupN][0][n % kGroupN].c;
      ptx::st_shared_16(fragment_smem(warp_, n),
                        {float_bits(c[0]), float_bits(c[1]), float_bits(c[2]), float_bits(c[3])});
    }
    ptx::sync_block();
    if (params_.splits > 1) {
      write<true>(rows);
    } else {
      write<false>(rows);
    }
  }

  // Each warp writes its share of the columns.
  template <bool kParts>
  FFPA_DEVICE void write(const SharedRowTile& rows) const {
    float references[2] = {-kInfinity, -kInfinity}, sums[2] = {0, 0}, values[kOwnN][4] = {};
    FFPA_NO_UNROLL
    for (int warp = 0; warp < kWarps; ++warp) {
      FFPA_UNROLL
      for (int h = 0; h < 2; ++h) references[h] = larger_of(references[h], note(warp, row_of_lane(h)));
    }
    FFPA_NO_UNROLL
    for (int warp = 0; warp < kWarps; ++warp) {
      float factors[2];
      FFPA_UNROLL
      for (int h = 0; h < 2; ++h) {
        factors[h] = growth(note(warp, row_of_lane(h)), references[h]);
        sums[h] += note(kWarps + warp, row_of_lane(h)) * factors[h];
      }
      FFPA_UNROLL
      for (int n = 0; n < kOwnN; ++n) {
        uint32_t bits[4];
        ptx::ld_shared_16(bits, fragment_smem(warp, warp_ * kOwnN + n));
        FFPA_UNROLL
        for (int e = 0; e < 4; ++e) values[n][e] += float_from_bits(bits[e]) * factors[e / 2];
      }
    }
    float factors[2];
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int row = row_of_lane(h);
      const bool writes = warp_ == 0 && lane_ % 4 == 0;
      factors[h] = finish_row(params_, rows, row, sink_of(params_, rows, row), references[h], sums[h], writes);
      factors[h] *= value_scale_;
    }
    auto writer = out_writer<Element, kOwnN, kParts>(params_, rows, 0, 0, lane_);
    FFPA_UNROLL
    for (int n = 0; n < kOwnN; n += 2) {
      FFPA_UNROLL
      for (int i = 0; i < 2; ++i) tile::scale_rows(values[n + i], factors);
      tile::to_adjacent(values[n], values[n + 1], lane_);
      FFPA_UNROLL
      for (int i = 0; i < 2; ++i) writer.put(n + i, values[n + i], [&](int m) { return (warp_ * kOwnN + m) * 8; });
    }
  }

  FFPA_DEVICE int row_of_lane(int h) const { return tile::c_coordinate(lane_, 2 * h).row; }
  FFPA_DEVICE uint32_t note_smem(int i, int row) const { return notes_smem_ + i * Config::kNoteBytes + row * 4; }
  FFPA_DEVICE float note(int i, int row) const { return float_from_bits(ptx::ld_shared_4(note_smem(i, row))); }
  FFPA_DEVICE uint32_t fragment_smem(int warp, int n) const {
    return ptx::dynamic_smem() + warp * Config::kOutBytes + (n * 32 + lane_) * 16;
  }

  const typename Config::Arguments& arguments_;
  const AttentionParams& params_;
  int lane_, warp_;
  uint32_t q_smem_;      // [key step][kRows][kColumns]
  uint32_t notes_smem_;  // [2][kWarps][kRows]: references and sums; at first [kRows]: factors of Q and 8-bit keys
  KeptRows rows_;
  typename Config::KeptKeys keys_;
  typename Config::Ring ring_;

  int first_tile_, end_tile_;
  int next_tile_, next_step_ = 0;           // the step that is brought next
  int known_tile_;                          // the first of the tiles whose runs lanes know
  int page_ahead_;                          // page of the lane's run in the tiles after these
  const uint16_t *k_of_lane_, *v_of_lane_;  // the lane's run
  float key_scale_[2], value_scale_ = 1;    // what scores of a row, and O, are multiplied with
  RowState state_;
};

template <class Config>
FFPA_KERNEL(Config::kThreads, Config::kMinBlocksPerSm)
void forward_mma_keys(FFPA_GRID_CONSTANT const typename Config::Arguments arguments) {
  ForwardMmaKeys<Config>(arguments).run();
}

}  // namespace ffpa
