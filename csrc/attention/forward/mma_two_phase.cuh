// This is the two-phase forward (forward/wgmma_two_phase.cuh) on mma.sync, for every GPU from sm_80 on. A block takes
// row tiles, kRows rows of one query head, one after the other, and for each row tile one chunk of keys after the
// other:
//
//   1. for each tile of kKeys keys   S = Q Kᵀ over d_qk, in steps of 32; P̃ = exp2(S - m), 16 bits, from registers to
//                                    the block's own slice of the scratch
//   2. for each kColumns of d_v      O = P̃ V over the keys of the chunk, in steps of 32; divided by the row sum
//
// References and chunks are those of forward/two_phase_tiles.cuh. A warp has 64 rows of a tile × a quarter of its keys
// or columns: four warps share their rows, and tell each other the maxima of each tile. While they compute P̃ or write
// O, the first steps of the next product are on their way.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/forward/two_phase_tiles.cuh"
#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "attention/score_rules.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/fragments.cuh"
#include "tile/kept_value.cuh"
#include "tile/mma_core.cuh"
#include "tile/smem_plan.cuh"
#include "tile/tile_copy.cuh"

namespace ffpa {

// Fields has Dtype; kColumns, the columns of O at a time.
template <class Fields>
struct ForwardMmaTwoPhaseConfig : Fields {
  using Params = AttentionParams;
  static constexpr int kKeys = 256;
  using ScoreCore = tile::MmaCore<typename Fields::Dtype, kKeys, tile::Lines::kAlong, tile::Lines::kAlong>;
  using ValueCore = tile::MmaCore<typename Fields::Dtype, Fields::kColumns, tile::Lines::kAlong, tile::Lines::kAcross>;
  using NarrowCore = tile::MmaCore<typename Fields::Dtype, 128, tile::Lines::kAlong, tile::Lines::kAcross>;
  static_assert(ScoreCore::kSlotBytes >= ValueCore::kSlotBytes && ValueCore::kSlotBytes >= NarrowCore::kSlotBytes,
                "slots of one ring serve all of them");
  static constexpr int kRows = ScoreCore::kRows;
  static constexpr int kThreads = ScoreCore::kThreads;
  using Scratch = TwoPhaseScratch<kRows, kKeys, Fields::kColumns>;

  static constexpr int kQuarters = 4;
  struct Smem {
    tile::SmemBytes<ScoreCore::kSmemBytes> core;
    tile::SmemBytes<KeptRows::kBytes> kept[kThreads / 32];                    // the rows in work, a copy for each warp
    float shared[kQuarters][kRows];                                           // a number of each warp that has a row
    tile::SmemBytes<MovedTiles::kBytes, 4> moves[kThreads / 32 / kQuarters];  // where references have moved
    uint32_t taken;                                                           // the row tile that the block has taken
  };
  static_assert(sizeof(Smem) <= tile::kSmemOfEveryGpu, "a block fits every GPU from sm_80 on");

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape;
    shape.grid.x = uint32_t(min_of(RowTiles<kRows>(params).count(), params.resident_blocks));
    shape.threads = kThreads;
    shape.smem_bytes = sizeof(Smem);
    shape.counter = Scratch(params).taken();
    return shape;
  }

  using Arguments = RowTileArguments<kRows>;
};

template <class Config>
class ForwardMmaTwoPhase {
  using Element = typename Config::Dtype;
  using Arguments = typename Config::Arguments;
  using ScoreCore = typename Config::ScoreCore;
  using ValueCore = typename Config::ValueCore;
  using NarrowCore = typename Config::NarrowCore;
  using Fragments = tile::DealtFragments;  // order of the keys
  using Scores = typename ScoreCore::Sums;
  static constexpr int kRows = Config::kRows;
  static constexpr int kKeys = Config::kKeys;
  static constexpr int kColumns = Config::kColumns;
  static constexpr int kQuarters = Config::kQuarters;
  static constexpr int kM = ScoreCore::kM;
  static constexpr int kWarps = ScoreCore::kThreads / 32;
  static constexpr int kGroup = 4;                        // fragments that hold 16 bytes a lane
  static constexpr int kGroups = ScoreCore::kN / kGroup;  // groups in a row of fragments
  using Chunk = KeyChunk<kKeys, ScoreCore::kStep>;

  // A lane has eight rows of fragments, and keeps the RowState of two of them: row g + 8e of the warp, g = lane / 4,
  // belongs to lane e % 4 of the four that have it, as half e / 4 of its RowState.
  static_assert(kM * 2 == 4 * 2, "four lanes answer for two rows each");
  using OfRows = float[kM][2];

 public:
  FFPA_DEVICE explicit ForwardMmaTwoPhase(const Arguments& arguments)
      : params_(arguments.params), row_tiles_(arguments.row_tiles) {
    derive_from_thread();
  }

  // This is for_each_row_tile() with a thread that is read anew, so that nothing of it is kept throughout a row tile.
  FFPA_DEVICE void run() {
    int item = ptx::block_x();
    FFPA_NO_UNROLL
    while (item < row_tiles_.count()) {
      derive_from_thread();
      kept().keep(row_tiles_.get(params_, item), lane_);
      if (has_row(kept().get(), 0)) compute_row_tile();
      item = take_row_tile();
    }
  }

 private:
  FFPA_DEVICE void compute_row_tile() {
    RowState state;
    Chunk::for_each(params_, kept().get(), [&](const Chunk& chunk) {
      const float before[2] = {state.reference[0], state.reference[1]};
      compute_probabilities(chunk, state);
      ptx::sync_block();  // P̃, references and moves are there
      if (chunk.is_last) finish_rows(state);
      if (!chunk.counts(params_)) return;
      const float factor[2] = {growth(before[0], state.reference[0]), growth(before[1], state.reference[1])};
      compute_out(chunk, state, factor);
    });
  }

  FFPA_DEVICE int take_row_tile() const {
    const uint32_t smem = ptx::dynamic_smem() + offsetof(typename Config::Smem, taken);
    ptx::sync_block();  // all have read the number before
    if (ptx::thread_x() == 0) ptx::st_shared_4(smem, ptx::grid_x() + ptx::atom_add_global(scratch().taken(), 1));
    ptx::sync_block();
    return int(ptx::ld_shared_4(smem));
  }

  // Reads the thread anew for each product: what all products share would be held in registers throughout the kernel.
  FFPA_DEVICE void derive_from_thread() {
    const int thread = ptx::thread_x_anew();
    lane_ = thread % 32;
    warp_ = thread / 32;
    scores_ = ScoreCore(thread);
    values_ = ValueCore(thread);
    narrow_ = NarrowCore(thread);
  }

  FFPA_DEVICE typename Config::Scratch scratch() const { return typename Config::Scratch(params_); }
  FFPA_DEVICE KeptRows kept() const {
    return KeptRows(ptx::dynamic_smem() + offsetof(typename Config::Smem, kept) + warp_ * KeptRows::kBytes);
  }

  // Return the quarter of keys and columns that the warp has, its first row, and the lane's row i of two.
  FFPA_DEVICE int quarter() const { return warp_ % kQuarters; }
  FFPA_DEVICE int first_row() const { return scores_.warp_row(); }
  FFPA_DEVICE int row_of_lane(int i) const { return first_row() + i * 32 + lane_ % 4 * 8 + lane_ / 4; }

  // ---- what the four warps of some rows, and the four lanes of a row of fragments, tell each other ----

  FFPA_DEVICE void sync_quarters() const { ptx::bar_sync(1 + warp_ / kQuarters, kQuarters * 32); }

  // Combines by combine(a, b) what the four warps have for the lane's two rows, with the same result in each. The
  // caller sees to it that no warp still reads earlier values.
  template <class Combine>
  FFPA_DEVICE void share(float (&values)[2], const Combine& combine) const {
    const uint32_t smem = ptx::dynamic_smem() + offsetof(typename Config::Smem, shared) + row_of_lane(0) * 4;
    FFPA_UNROLL
    for (int i = 0; i < 2; ++i) {
      ptx::st_shared_4(smem + (quarter() * kRows + i * 32) * 4, float_bits(values[i]));
    }
    sync_quarters();
    FFPA_UNROLL
    for (int i = 0; i < 2; ++i) {
      FFPA_UNROLL
      for (int other = 0; other < kQuarters; ++other) {
        const float value = float_from_bits(ptx::ld_shared_4(smem + (other * kRows + i * 32) * 4));
        values[i] = other == 0 ? value : combine(values[i], value);
      }
    }
  }

  // gather() combines the parts that four lanes have of each row, and leaves each lane its two rows; of_row() gives the
  // value of a row to all four.
  template <class Combine>
  FFPA_DEVICE void gather(const OfRows& parts, float (&values)[2], const Combine& combine) const {
    FFPA_UNROLL
    for (int e = 0; e < 2 * kM; ++e) {
      float value = parts[e / 2][e % 2];
      value = combine(value, ptx::shfl_xor(value, 1));
      value = combine(value, ptx::shfl_xor(value, 2));
      if (lane_ % 4 == e % 4) values[e / 4] = value;
    }
  }

  FFPA_DEVICE float of_row(const float (&values)[2], int m, int h) const {
    const int e = 2 * m + h;
    return ptx::shfl_idx(values[e / 4], lane_ / 4 * 4 + e % 4);
  }

  // ---- 1. P̃ ----

  FFPA_DEVICE void compute_probabilities(const Chunk& chunk, RowState& state) {
    if (chunk.tiles() > 0) begin_keys(chunk.first_tile);
    MovedTiles moves(moves_smem());
    FFPA_NO_UNROLL
    for (int tile = 0; tile < chunk.tiles(); ++tile) {
      derive_from_thread();
      Scores scores;
      scores_.multiply(ring_, scores, ceil_div(params_.d_qk, ScoreCore::kStep), [&] { bring_keys(); });
      apply_rules_to(scores, (chunk.first_tile + tile) * kKeys);
      const bool moved = follow(scores, state);
      if (tile + 1 < chunk.tiles()) begin_keys(chunk.first_tile + tile + 1);
      if (quarter() == 0) {
        keep_references(tile, state);
        moves.add(tile, moved, lane_);
      }
      store(scores, tile * kKeys, state);
    }
  }

  FFPA_DEVICE uint32_t moves_smem() const {
    return ptx::dynamic_smem() + offsetof(typename Config::Smem, moves) + warp_ / kQuarters * MovedTiles::kBytes;
  }

  // begin_keys() starts the copies of Q and of a tile of K, bring_keys() those of one more step.
  FFPA_DEVICE void begin_keys(int tile) {
    const SharedRowTile rows = kept().get();
    a_ = window(params_.q, rows, rows.head(), rows.entry.q, rows.first, 0, params_.d_qk);
    a_.rows = rows.last + 1 - rows.first;
    b_ = window(params_.k, rows, rows.head() / params_.group, rows.entry.k, tile * kKeys, 0, params_.d_qk);
    left_ = params_.d_qk;
    FFPA_NO_UNROLL
    for (int step = 0; step < ring_.ahead(); ++step) bring_keys();
  }

  FFPA_DEVICE void bring_keys() {
    if (left_ <= 0) return;
    const int columns = left_;
    const auto row_at = [&](int i) {
      const RowPlace at = row_tiles_.place_in_tile(params_, i);
      return a_.origin + at.head * params_.q.head_stride + at.row * params_.q.row_stride;
    };
    scores_.bring_rows(
        ring_, row_at,
        [&](int i, int chunk) {
          return row_tiles_.place_in_tile(params_, i).row < a_.rows && chunk * tile::kChunkElements < columns;
        },
        b_, [&](int key, int chunk) { return key < b_.rows && chunk * tile::kChunkElements < columns; });
    a_.origin += ScoreCore::kStep;
    b_.origin += ScoreCore::kStep;
    left_ -= ScoreCore::kStep;
  }

  static FFPA_DEVICE tile::GmemWindow window(const TensorView& x, const RowTile& rows, int head, const RowRange& range,
                                             int first, int column, int columns) {
    const int64_t row = range.begin + int64_t(first);
    return {x.data + rows.batch() * x.batch_stride + head * x.head_stride + row * x.row_stride + column, x.row_stride,
            range.end - range.begin - first, columns - column};
  }

  FFPA_DEVICE void apply_rules_to(Scores& sums, int key) const {
    const SharedRowTile rows = kept().get();
    const bool all_seen = all_rows_see(rows, key, kKeys);
    if (are_plain(params_, all_seen)) return;
    static_assert(ScoreCore::kN % kGroup == 0 && sizeof(sums[0][0]) == 4 * sizeof(float),
                  "A group of fragments is floats.");
    FFPA_UNROLL
    for (int m = 0; m < kM; ++m) {
      FFPA_UNROLL
      for (int first = 0; first < ScoreCore::kN; first += kGroup) {  // all at once would take more registers
        apply_rules<Rules::kInFewRegisters, Fragments>(
            reinterpret_cast<float (&)[1][kGroup][4]>(sums[m][first]), params_, rows, all_seen, first_row() + m * 16,
            key + scores_.warp_column() + Fragments::column_of(first), lane_);
      }
    }
  }

  // Lets references follow the maxima over all keys of a tile, and says whether one of the lane's has moved.
  FFPA_DEVICE bool follow(const Scores& scores, RowState& state) const {
    OfRows parts;
    tile::for_each_row<kM>([&](int m, int h) {
      parts[m][h] = largest_of_thread(reinterpret_cast<const float (&)[ScoreCore::kN][4]>(scores[m]), h);
    });
    float maximum[2];
    gather(parts, maximum, [](float a, float b) { return larger_of(a, b); });
    sync_quarters();  // all have read the maxima of the tile before
    share(maximum, [](float a, float b) { return larger_of(a, b); });
    state.keep_largest(maximum, params_, quarter());  // four warps have the same
    const Slopes slopes = slopes_of(params_);
    const bool moved = state.follow(0, slopes.logit(maximum[0]));
    return state.follow(1, slopes.logit(maximum[1])) || moved;
  }

  FFPA_DEVICE void keep_references(int tile_of_chunk, const RowState& state) const {
    float* references = scratch().references(ptx::block_x()) + tile_of_chunk * kRows;
    FFPA_UNROLL
    for (int i = 0; i < 2; ++i) ptx::st_global_4(references + row_of_lane(i), float_bits(state.reference[i]));
  }

  // Stores P̃ of a tile to the block's slice, from its column `column` on.
  FFPA_DEVICE void store(const Scores& scores, int column, RowState& state) const {
    const Slopes slopes = slopes_of(params_);
    const int64_t row = int64_t(ptx::block_x()) * kRows + first_row() + tile::c_coordinate(lane_, 0).row;
    uint16_t* gmem =
        scratch().p() + row * params_.chunk_keys + column + scores_.warp_column() + Fragments::first_column(lane_);
    OfRows parts;
    tile::for_each_row<kM>([&](int m, int h) {
      const RowExponents exponents = RowExponents::of(slopes, of_row(state.reference, m, h));
      parts[m][h] = 0;
      FFPA_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        uint32_t chunk[kGroup];
        FFPA_UNROLL
        for (int n = 0; n < kGroup; ++n) {
          const float (&c)[4] = scores[m][group * kGroup + n].c;
          const float p0 = exponents.p(c[2 * h]), p1 = exponents.p(c[2 * h + 1]);
          parts[m][h] += p0 + p1;
          chunk[n] = ptx::pack<Element>(p0, p1);
        }
        ptx::st_global_16(gmem + Fragments::column_of(group * kGroup), chunk);
      }
      gmem += int64_t{8} * params_.chunk_keys;
    });
    float sum[2];
    gather(parts, sum, [](float a, float b) { return a + b; });
    FFPA_UNROLL
    for (int i = 0; i < 2; ++i) state.sum[i] += sum[i];
  }

  // ---- 2. O ----

  // Writes the LSE of the rows, tells of their largest scores, of which two of the four warps have one each for a lane,
  // and replaces their sums by what O is to be multiplied with.
  FFPA_DEVICE void finish_rows(RowState& state) const {
    const SharedRowTile rows = kept().get();
    if (params_.largest != nullptr && quarter() < 2) {
      tell_largest(score_of(params_, state.top), params_, rows, row_of_lane(quarter()));
    }
    share(state.sum, [](float a, float b) { return a + b; });
    FFPA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = row_of_lane(i);
      state.sum[i] =
          finish_row(params_, rows, row, sink_of(params_, rows, row), state.reference[i], state.sum[i], quarter() == 0);
    }
  }

  // Computes kColumns columns of O after the others; where few are left, a core with fewer computes the last ones.
  FFPA_DEVICE void compute_out(const Chunk& chunk, const RowState& state, const float (&factor)[2]) {
    begin_values(chunk, 0);
    FFPA_NO_UNROLL
    for (int column = 0; column < params_.d_v; column += kColumns) {
      if (is_narrow(column)) {
        compute_columns(narrow_, chunk, column, state, factor);
      } else {
        compute_columns(values_, chunk, column, state, factor);
      }
    }
  }

  FFPA_DEVICE bool is_narrow(int column) const { return params_.d_v - column <= NarrowCore::kColumns; }

  template <class Core>
  FFPA_DEVICE void compute_columns(const Core& core, const Chunk& chunk, int column, const RowState& state,
                                   const float (&factor)[2]) {
    derive_from_thread();
    typename Core::Sums out;
    int tile = 0;
    FFPA_NO_UNROLL
    while (true) {  // each turn goes from one tile where a reference has moved to the next
      const int next = MovedTiles::next<1>(moves_smem(), tile + 1, chunk.tiles());
      core.multiply(ring_, out, chunk.steps(tile, next), [&] { bring_values(core); });
      if (next >= chunk.tiles()) break;
      tile = next;
      follow_references(out, tile);
    }
    if (column + kColumns < params_.d_v) begin_values(chunk, column + kColumns);
    finish(core, out, chunk, column, state, factor);
  }

  // Rescales what earlier tiles have left to the references of this tile.
  template <class Sums>
  FFPA_DEVICE void follow_references(Sums& out, int tile) const {
    const float* references =
        scratch().references(ptx::block_x()) + tile * kRows + first_row() + tile::c_coordinate(lane_, 0).row;
    FFPA_UNROLL
    for (int m = 0; m < kM; ++m) {
      float factor[2];
      FFPA_UNROLL
      for (int h = 0; h < 2; ++h) {
        const float* now = references + m * 16 + h * 8;
        factor[h] = growth(float_from_bits(ptx::ld_global_4(now - kRows)), float_from_bits(ptx::ld_global_4(now)));
      }
      for (auto& sums : out[m]) tile::scale_rows(sums, factor);
    }
  }

  // begin_values() starts the copies of P̃ and of some columns of V, bring_values() those of one more step.
  FFPA_DEVICE void begin_values(const Chunk& chunk, int column) {
    const SharedRowTile rows = kept().get();
    const int64_t row = int64_t(ptx::block_x()) * kRows;
    a_ = {scratch().p() + row * params_.chunk_keys + chunk.keys.begin - chunk.first_key(), params_.chunk_keys, kRows,
          ValueCore::kStep};
    b_ = window(params_.v, rows, rows.head() / params_.group, rows.entry.k, chunk.keys.begin, column, params_.d_v);
    left_ = chunk.steps();
    FFPA_NO_UNROLL
    for (int step = 0; step < ring_.ahead(); ++step) {
      if (is_narrow(column)) {
        bring_values(narrow_);
      } else {
        bring_values(values_);
      }
    }
  }

  template <class Core>
  FFPA_DEVICE void bring_values(const Core& core) {
    if (left_ <= 0) return;
    core.bring(
        ring_, a_, [](int, int) { return true; }, b_,
        [&](int key, int chunk) { return key < b_.rows && chunk * tile::kChunkElements < b_.columns; });
    a_.origin += Core::kStep;
    b_.origin += Core::kStep * params_.v.row_stride;
    b_.rows -= Core::kStep;
    --left_;
  }

  // Adds what earlier chunks left of O, and stores it for a later chunk or as the result.
  template <class Core>
  FFPA_DEVICE void finish(const Core& core, typename Core::Sums& out, const Chunk& chunk, int column,
                          const RowState& state, const float (&factor)[2]) const {
    float* partial = scratch().out(ptx::block_x(), column) + warp_ * (kRows * kColumns / kWarps);
    if (!(chunk.is_first && chunk.is_last)) {
      FFPA_UNROLL
      for (int m = 0; m < kM; ++m) {
        const float of_earlier[2] = {of_row(factor, m, 0), of_row(factor, m, 1)};
        FFPA_UNROLL
        for (int n = 0; n < Core::kN; ++n) {
          add_chunks(out[m][n].c, chunk, partial + m * (16 * Core::kWarpColumns), n, of_earlier, lane_);
        }
      }
    }
    if (!chunk.is_last) return;
    if (params_.splits > 1) {
      write<true>(core, out, column, state);
    } else {
      write<false>(core, out, column, state);
    }
  }

  // Writes O, or with kParts that of a part of the keys.
  template <bool kParts, class Core>
  FFPA_DEVICE void write(const Core& core, const typename Core::Sums& out, int column, const RowState& state) const {
    const SharedRowTile rows = kept().get();
    FFPA_UNROLL
    for (int m = 0; m < kM; ++m) {
      const float inverse[2] = {of_row(state.sum, m, 0), of_row(state.sum, m, 1)};
      auto writer = out_writer<Element, Core::kN, kParts>(params_, rows, first_row() + m * 16,
                                                          column + core.warp_column(), lane_);
      FFPA_UNROLL
      for (int n = 0; n < Core::kN; ++n) {
        float values[4];
        out[m][n].get(values);
        FFPA_UNROLL
        for (int e = 0; e < 4; ++e) values[e] *= inverse[e / 2];
        writer.put(n, values);
      }
    }
  }

  const AttentionParams& params_;
  const RowTiles<kRows>& row_tiles_;
  int lane_, warp_;
  ScoreCore scores_;
  ValueCore values_;
  NarrowCore narrow_;
  typename ScoreCore::Ring ring_ = ScoreCore::make_ring();
  tile::GmemWindow a_, b_;  // rest of the operands that are being brought
  int left_;                // columns of Q and K, or steps of P̃ and V, that are left
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void forward_mma_two_phase(FFPA_GRID_CONSTANT const typename Config::Arguments arguments) {
  ForwardMmaTwoPhase<Config>(arguments).run();
}

}  // namespace ffpa
