// Split-D attention forward on mma.sync. A block of threads has a row tile of kRows rows; for each tile of
// kKeys keys:
//
//   1. S = Q Kᵀ      in steps of kKeyColumns columns of the head dim, accumulated in registers;
//   2. softmax       row maxima of the warps meet in shared memory; P goes to shared memory as 16-bit numbers;
//   3. O = αO + P V  in steps of kValueRows keys, for kColumns columns of O at a time.
//
// Three levels differ in where O is meanwhile:
//
//   L1   in registers, all of it (d_v ≤ kColumns);
//   L2   in registers, one group of kColumns columns; each group is a work item of its own, with S computed again;
//   L3   kStreamed: in global scratch, in fp32; step 3 brings in one group of columns after the other.
//
// The head dim of Q and K is a loop count, and so is the number of column groups. The warps split S by rows and keys
// and O by columns: two different grids, which is why P crosses shared memory. K and V steps come through one ring (or
// one each). The two teams of warps share nothing else, so that one computes products while the other is in its
// softmax.
#pragma once

#include "attention/forward/mma_split_config.cuh"
#include "attention/params/attention_params.h"
#include "attention/rows/item_grid.cuh"
#include "attention/rows/paged_copy.cuh"
#include "attention/rows/row_tile.cuh"
#include "attention/rows/row_tiles.cuh"
#include "attention/score_rules.cuh"
#include "attention/softmax.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "tile/e4m3_fragments.cuh"
#include "tile/fragments.cuh"
#include "tile/multiply.cuh"
#include "tile/stage_ring.cuh"
#include "tile/tile_copy.cuh"

namespace ffpa {

template <class Config>
class ForwardMmaSplit {
  using Element = typename Config::Dtype;
  using Probability = typename Config::Probability;
  static constexpr int kRows = Config::kRows;
  static constexpr int kKeys = Config::kKeys;
  static constexpr int kColumns = Config::kColumns;
  static constexpr int kKeyColumns = Config::kKeyColumns;
  static constexpr int kValueRows = Config::kValueRows;
  static constexpr int kValueSteps = kKeys / kValueRows;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kTeamWarps = Config::kTeamWarps;
  static constexpr bool kOwnRings = Config::kOwnRings;
  static constexpr bool kLooksAhead = Config::kPaged && !Config::kStreamed;  // where registers hold pages

  // One warp has, in fragments, S [kScoreM × kScoreN] and O [kOutM × kOutN].
  static constexpr int kScoreM = Config::kScoreWarpRows / 16, kScoreN = Config::kScoreWarpKeys / 8;
  static constexpr int kOutM = Config::kTeamRows / 16, kOutN = Config::kOutWarpPairs * 2;
  using Scores = float[kScoreM][kScoreN][4];
  using Out = tile::Accumulator<typename Config::AccPv>[kOutM][kOutN];

 public:
  FFPA_DEVICE explicit ForwardMmaSplit(const typename Config::Arguments& arguments)
      : arguments_(arguments),
        params_(arguments.params),
        thread_(ptx::thread_x()),
        lane_(ptx::lane_id()),
        team_(thread_ / 32 / kTeamWarps),
        team_warp_(thread_ / 32 % kTeamWarps),
        p_smem_(ptx::dynamic_smem() + Config::all_slots_bytes(params_)),
        partial_smem_(p_smem_ + Config::kProbabilityBytes),
        factor_smem_(partial_smem_ + Config::kScoreWarpsByKeys * Config::kStatisticBytes),
        rows_(factor_smem_ + Config::kStatisticBytes + Config::kBarrierBytes),
        keys_(factor_smem_ + Config::kStatisticBytes + Config::kBarrierBytes + KeptRows::kBytes),
        q_smem_(factor_smem_ + Config::kStatisticBytes + Config::kBarrierBytes + KeptRows::kBytes +
                Config::KeptKeys::kBytes),
        key_steps_(Config::key_steps(params_)),
        key_feed_{
            {factor_smem_ + Config::kStatisticBytes, ptx::dynamic_smem(), params_.stages, Config::slot_bytes(params_)}},
        value_feed_{{factor_smem_ + Config::kStatisticBytes + Config::Ring::kBarrierBytes,
                     ptx::dynamic_smem() + params_.stages * Config::slot_bytes(params_), params_.value_stages,
                     Config::kValueStepBytes}} {
    key_feed_.ring.init(thread_);
    if (kOwnRings) value_feed_.ring.init(thread_);
  }

  FFPA_DEVICE void run(int item) {
    begin(item);
    if constexpr (Config::kStreamed) {
      const int groups = Config::column_groups(params_);
      for (int tile = first_tile_; tile < end_tile_; ++tile) {
        attend_to(tile);
        if (tile == end_tile_ - 1) finish_rows();
        for (int group = 0; group < groups; ++group) {
          Out out;
          if (tile > first_tile_) load(out, group);
          rescale(out);
          add_values(out);
          if (tile < end_tile_ - 1) {
            save(out, group);
          } else {
            write(out, group * kColumns);
          }
        }
      }
      if (first_tile_ == end_tile_) {
        finish_rows();
        for (int group = 0; group < groups; ++group) write(Out{}, group * kColumns);
      }
    } else {
      Out out;
      for (int tile = first_tile_; tile < end_tile_; ++tile) {
        attend_to(tile);
        rescale(out);
        add_values(out);
      }
      finish_rows();
      // Nobody reads O of a part without keys; half of all parts are such, where a server decodes.
      if (Config::kE4m3 && params_.splits > 1 && first_tile_ == end_tile_) return;
      write(out, first_column_);
    }
  }

 private:
  // ---- the work item ----

  FFPA_DEVICE void begin(int item) {
    const int groups = Config::groups_of_items(params_);
    first_column_ = item % groups * kColumns;
    const SharedRowTile rows = arguments_.row_tiles.get(params_, item / groups);
    if (thread_ < 32) {
      rows_.keep(rows, lane_);
      keys_.keep(mma_keys<Config::kPaged>(params_, rows), lane_);
    }
    ptx::sync_block();  // the row tile is there, and the barriers of the ring are

    const TileRange tiles = visible_part(rows, kKeys, params_);
    first_tile_ = tiles.first;
    end_tile_ = tiles.end;
    key_feed_.tile = value_feed_.tile = first_tile_;
    key_feed_.step = key_feed_.group = value_feed_.group = 0;
    value_feed_.step = key_steps_;
    for (RowState& state : states_) state = {};

    if (first_tile_ == end_tile_) return;
    if constexpr (kLooksAhead) {
      page_ahead_ = look_up(first_tile_);
      look_ahead(first_tile_);
    }
    if (params_.q_resident) {  // Q belongs to the first step's copies
      for (int step = 0; step < key_steps_; ++step) copy_queries(q_smem_ + step * Config::kQueryStepBytes, rows, step);
    }
    if constexpr (Config::kE4m3) ptx::cp_async_commit_group();
    for (int step = 0; step < key_feed_.ring.ahead(); ++step) load_next_step<kOfKeys>();
    for (int step = 0; kOwnRings && step < value_feed_.ring.ahead(); ++step) load_next_step<kOfValues>();
    if constexpr (Config::kE4m3) prepare_queries(rows.count(), scales_of_head(params_, rows));
  }

  // ---- Q, and the steps of K and V on their way into shared memory: forward/mma_split_copies.cuh ----

  FFPA_DEVICE void prepare_queries(int rows, const KeyScales& scales);

  // The step that a ring brings next: steps 0 … are those of K; those of V follow, counted on, for each column group.
  struct Feed {
    typename Config::Ring ring;
    int tile = 0, step = 0, group = 0;
  };
  enum Operand { kOfKeys, kOfValues };

  template <Operand kOperand>
  FFPA_DEVICE Feed& feed() {
    return kOwnRings && kOperand == kOfValues ? value_feed_ : key_feed_;
  }

  template <Operand kOperand>
  FFPA_DEVICE void load_next_step();
  FFPA_DEVICE void look_ahead(int tile);
  FFPA_DEVICE int look_up(int tile) const { return look_up_keys<kKeys>(tile * kKeys); }
  template <int kCount>
  FFPA_DEVICE int look_up_keys(int key) const;
  template <class Window>
  FFPA_DEVICE const uint16_t* run_of(const Window& window, int page, int key) const;
  FFPA_DEVICE void copy_queries(uint32_t target_smem, const SharedRowTile& rows, int step) const;
  FFPA_DEVICE void copy_keys(uint32_t slot, int tile, int step) const;
  FFPA_DEVICE void copy_values(uint32_t slot, int tile, int step, int group) const;
  template <int kCopiedRows, int kCopiedColumns, class Window>
  FFPA_DEVICE void copy_async(uint32_t slot, const typename Config::Layout& layout, Window window,
                              const uint16_t* of_lane, int key, int column) const;

  template <Operand kOperand>
  FFPA_DEVICE uint32_t next_step() {
    load_next_step<kOperand>();
    return feed<kOperand>().ring.begin_use();
  }

  // Meets the warps of the team alone: P, maxima and factors of its rows are its own.
  FFPA_DEVICE void sync_team() const { ptx::bar_sync(1 + team_, kTeamWarps * 32); }

  // ---- 1., 2. S = Q Kᵀ, softmax ----

  // Leaves P and α of the tile in shared memory.
  FFPA_DEVICE void attend_to(int tile) {
    Scores scores;
    compute_scores(scores);
    apply_rules_to(scores, tile * kKeys);
    FFPA_UNROLL
    for (int m = 0; m < kScoreM; ++m) {
      float maxima[2];
      FFPA_UNROLL
      for (int h = 0; h < 2; ++h) {
        maxima[h] = tile::largest_of_lanes(largest_of_thread(scores[m], h));
        publish(m, h, maxima[h]);
      }
      states_[m].keep_largest(maxima, params_, lane_);
    }
    sync_team();  // the maxima of all warps are there, and all have used P of the tile before
    compute_probabilities(scores);
    sync_team();  // P and α are there
  }

  FFPA_DEVICE void apply_rules_to(Scores& scores, int key) const {
    const bool all_seen = all_rows_see(rows_.get(), key, kKeys);
    if (are_plain(params_, all_seen)) return;
    FFPA_UNROLL
    for (int m = 0; m < kScoreM; ++m) {  // all at once, or a row tile kept for all, would take more registers
      apply_rules<Config::kPaged ? Rules::kWithoutMasks : Rules::kInFewRegisters>(
          reinterpret_cast<float (&)[1][kScoreN][4]>(scores[m]), params_, rows_.get(), all_seen, score_row() + m * 16,
          key + score_key(), lane_);
    }
  }

  FFPA_DEVICE void compute_scores(Scores& scores) {
    tile::Accumulator<typename Config::AccQk> s[kScoreM][kScoreN];
    FFPA_NO_UNROLL
    for (int step = 0; step < key_steps_; ++step) {
      const uint32_t k_smem = next_step<kOfKeys>();
      const uint32_t q_smem =
          params_.q_resident ? q_smem_ + step * Config::kQueryStepBytes : k_smem + Config::kKeyStepBytes;
      const uint32_t of_a = lane_offset(Config::query_layout(), tile::ldmatrix_a(lane_), score_row());
      const uint32_t of_b = lane_offset(Config::key_layout(), tile::ldmatrix_b_pair(lane_), score_key());
      const auto load_a = [&](uint32_t (&a)[4], int m, int depth) {
        ptx::ldmatrix_x4(a, q_smem + Config::query_layout().moved(of_a, m * 16, depth * 2));
      };
      const auto load_b = [&](uint32_t (&b)[4], int depth, int pair) {
        ptx::ldmatrix_x4(b, k_smem + Config::key_layout().moved(of_b, pair * 16, depth * 2));
      };
      if constexpr (Config::kE4m3) {  // a chunk is a depth, and so two of them are
        tile::add_product_of_e4m3<false, kKeyColumns / 16>(s, load_a, load_b);
      } else {
        tile::add_product<Element, Config::kAhead, kKeyColumns / 16>(s, load_a, load_b);
      }
      feed<kOfKeys>().ring.end_use();
    }
    FFPA_UNROLL
    for (int m = 0; m < kScoreM; ++m) {
      FFPA_UNROLL
      for (int n = 0; n < kScoreN; ++n) {
        s[m][n].get(scores[m][n]);
        FFPA_UNROLL
        for (int e = 0; Config::kE4m3 && e < 4; ++e) scores[m][n][e] *= key_scale_[m][e / 2];
      }
    }
  }

  FFPA_DEVICE void compute_probabilities(const Scores& scores) {
    const int lane = ptx::thread_x_anew() % 32;  // addresses of P are too many to be kept from tile to tile
    const Slopes slopes = slopes_of(params_);
    tile::for_each_row<kScoreM>([&](int m, int h) {
      RowState& state = states_[m];
      const int row = score_row() + m * 16 + tile::c_coordinate(lane, 2 * h).row;
      float maximum = -kInfinity;
      for_each_warp(row, [&](float of_warp) { maximum = larger_of(maximum, of_warp); });
      const float before = state.reference[h];
      state.follow(h, slopes.logit(maximum), kLazyGrowth<typename Config::AccPv>);
      if (score_warp_by_keys() == 0 && lane % 4 == 0) {
        ptx::st_shared_4(factor_smem_ + row * sizeof(float), float_bits(growth(before, state.reference[h])));
      }
      const RowExponents exponents = RowExponents::of(slopes, state.reference[h]);
      float sum = 0;
      FFPA_UNROLL
      for (int n = 0; n < kScoreN; ++n) {
        const float p0 = exponents.p(scores[m][n][2 * h]), p1 = exponents.p(scores[m][n][2 * h + 1]);
        sum += p0 + p1;
        const int chunk = score_key() / tile::kChunkElements + n;
        const uint32_t within_chunk = tile::c_coordinate(lane, 0).column * sizeof(uint16_t);
        ptx::st_shared_4(p_smem_ + Config::probability_layout().offset(row, chunk) + within_chunk,
                         ptx::pack<Probability>(p0, p1));
      }
      state.sum[h] += sum;
    });
  }

  // ---- 3. O = αO + P V ----

  FFPA_DEVICE void rescale(Out& out) const {
    float factor[kOutM][2];
    bool any = false;
    tile::for_each_row<kOutM>([&](int m, int h) {
      factor[m][h] = statistic(factor_smem_, out_row(m, h));
      any |= factor[m][h] != 1;
    });
    if (!ptx::vote_any(any)) return;
    FFPA_UNROLL
    for (int m = 0; m < kOutM; ++m) {
      FFPA_UNROLL
      for (int n = 0; n < kOutN; ++n) tile::scale_rows(out[m][n], factor[m]);
    }
  }

  FFPA_DEVICE void add_values(Out& out) {
    FFPA_NO_UNROLL
    for (int step = 0; step < kValueSteps; ++step) {
      const uint32_t v_smem = next_step<kOfValues>();
      const uint32_t of_a = lane_offset(Config::probability_layout(), tile::ldmatrix_a(lane_), out_row_begin());
      const auto load_a = [&](uint32_t (&a)[4], int m, int depth) {
        const int chunk = (step * kValueRows + depth * 16) / tile::kChunkElements;
        ptx::ldmatrix_x4(a, p_smem_ + Config::probability_layout().moved(of_a, m * 16, chunk));
      };
      const auto load_b = [&](uint32_t (&b)[4], int depth, int pair) {
        const tile::Coordinate at = tile::ldmatrix_b_pair_trans(lane_);
        const uint32_t rows_above = Config::value_layout().bytes(depth * 16);
        const int chunk = pair_column(pair) / tile::kChunkElements;
        ptx::ldmatrix_x4_trans(b, v_smem + Config::value_layout().offset(at.row, chunk + at.column) + rows_above);
      };
      if constexpr (Config::kE4m3) {  // a chunk has the columns of a pair, and a load the rows of two depths
        tile::add_product_of_e4m3<true, kValueRows / 16>(out, load_a, [&](uint32_t (&bytes)[4], int depths, int pair) {
          const uint32_t rows_above = Config::value_layout().bytes(depths * 32);
          ptx::ldmatrix_x4_trans(bytes,
                                 v_smem + Config::value_layout().offset(lane_, pair_column(pair) / 16) + rows_above);
        });
      } else {
        tile::add_product<Element, Config::kAhead, kValueRows / 16>(out, load_a, load_b);
      }
      feed<kOfValues>().ring.end_use();
    }
  }

  // Returns the first column, within the group, of a pair of fragments. Warps that have a pair less than others repeat
  // their first one.
  FFPA_DEVICE int pair_column(int pair) const {
    const bool exists = Config::kOutPairs % kTeamWarps == 0 || pair * kTeamWarps + team_warp_ < Config::kOutPairs;
    return ((exists ? pair * kTeamWarps : 0) + team_warp_) * 16;
  }

  // ---- O in scratch, fragment by fragment; out = O / row sum, LSE: forward/mma_split_out.cuh ----

  FFPA_DEVICE float* scratch_of(int group) const;
  FFPA_DEVICE void load(Out& out, int group) const;
  FFPA_DEVICE void save(const Out& out, int group) const;

  FFPA_DEVICE void finish_rows();
  FFPA_DEVICE void write(const Out& out, int first_column) const;
  template <bool kParts>
  FFPA_DEVICE void write_as(const Out& out, int first_column) const;

  FFPA_DEVICE float row_sum(int row) const {
    float sum = 0;
    for_each_warp(row, [&](float of_warp) { sum += of_warp; });
    return sum;
  }

  // ---- this thread's share ----

  // Returns the offset of the lane's row and chunk of a fragment, from row `row` on, for Layout::moved().
  static FFPA_DEVICE uint32_t lane_offset(const typename Config::Layout& layout, const tile::Coordinate& at, int row) {
    return layout.offset(row + at.row, at.column);
  }

  FFPA_DEVICE int score_warp_by_keys() const { return team_warp_ % Config::kScoreWarpsByKeys; }
  FFPA_DEVICE int score_key() const { return score_warp_by_keys() * Config::kScoreWarpKeys; }
  FFPA_DEVICE int score_row() const {
    return team_ * Config::kTeamRows + team_warp_ / Config::kScoreWarpsByKeys * Config::kScoreWarpRows;
  }
  FFPA_DEVICE int score_row(int m, int h) const { return score_row() + m * 16 + tile::c_coordinate(lane_, 2 * h).row; }
  FFPA_DEVICE int out_row_begin() const { return team_ * Config::kTeamRows; }
  FFPA_DEVICE int out_row(int m, int h) const {
    return out_row_begin() + m * 16 + tile::c_coordinate(lane_, 2 * h).row;
  }

  static FFPA_DEVICE float statistic(uint32_t base_smem, int index) {
    return float_from_bits(ptx::ld_shared_4(base_smem + index * sizeof(float)));
  }

  // Returns the place of what a warp publishes of a row: 8 rows that are written together lie in different banks.
  static FFPA_DEVICE int published_place(int row, int warp) {
    constexpr int kWarps = Config::kScoreWarpsByKeys;
    return row * kWarps + (warp ^ (kWarps == 8 ? row & 4 : 0));
  }

  // Calls function(number) with what each warp has published of a row.
  template <class Function>
  FFPA_DEVICE void for_each_warp(int row, const Function& function) const {
    constexpr int kWarps = Config::kScoreWarpsByKeys, kAtOnce = kWarps % 4 == 0 ? 4 : 1;
    FFPA_UNROLL
    for (int warp = 0; warp < kWarps; warp += kAtOnce) {
      const uint32_t from_smem = partial_smem_ + published_place(row, warp) * sizeof(float);
      uint32_t bits[4] = {};
      if constexpr (kAtOnce == 4) {
        ptx::ld_shared_16(bits, from_smem);
      } else {
        bits[0] = ptx::ld_shared_4(from_smem);
      }
      FFPA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) function(float_from_bits(bits[i]));
    }
  }

  // Publishes a number that the warp has for one of its rows, for the other warps.
  FFPA_DEVICE void publish(int m, int h, float value) const {
    if (lane_ % 4 != 0) return;
    const int place = published_place(score_row(m, h), score_warp_by_keys());
    ptx::st_shared_4(partial_smem_ + place * sizeof(float), float_bits(value));
  }

  const typename Config::Arguments& arguments_;
  const AttentionParams& params_;
  int thread_, lane_, team_, team_warp_;
  uint32_t p_smem_;        // [kRows][kKeys]
  uint32_t partial_smem_;  // [kRows][kScoreWarpsByKeys]: maxima of a tile; in the end sums, and factors of O; at first
                           // [kRows]: factors of Q and 8-bit keys
  uint32_t factor_smem_;   // [kRows]: α
  KeptRows rows_;
  typename Config::KeptKeys keys_;
  uint32_t q_smem_;  // resident Q: [key step][kRows][kKeyColumns]
  int key_steps_;
  Feed key_feed_, value_feed_;  // key_feed_ brings both, unless there are two rings

  int first_column_;
  int first_tile_, end_tile_;

  const uint16_t *k_of_lane_, *v_of_lane_;         // the lane's own run in the tile whose steps come next
  int page_ahead_;                                 // page of its run in the tile after
  float key_scale_[kScoreM][2], value_scale_ = 1;  // of 8-bit keys: what scores of a row, and O, are multiplied with
  RowState states_[kScoreM];                       // state m is that of the rows 16m + 8h + lane / 4 of the warp
};

template <class Config>
FFPA_KERNEL(Config::kThreads, Config::kMinBlocksPerSm)
void forward_mma_split(FFPA_GRID_CONSTANT const typename Config::Arguments arguments) {
  ForwardMmaSplit<Config> forward(arguments);
  if constexpr (Config::kStreamed) {
    const int items = arguments.row_tiles.count();
    for (int item = block_number(); item < items; item += blocks_of_grid()) {
      forward.run(item);
      ptx::sync_block();  // nobody reads Q or the statistics of this item any more
    }
  } else {
    const int item = block_number();
    forward.run(Config::kE4m3 ? arguments.row_tiles.heads_before_parts(item) : item);
  }
}

}  // namespace ffpa

#include "attention/forward/mma_split_copies.cuh"
#include "attention/forward/mma_split_out.cuh"
