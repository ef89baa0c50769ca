// Computes all gradients of a key/value head whose keys fit into one tile, in one block of threads and one launch: P
// and dS never leave shared memory. A row tile is kTile rows of a query head. A warp has 16 rows of it and 64 keys, or
// 16 lines of a gradient and some columns:
//
//   for each row tile       S = Q Kᵀ,  P = exp2(S - LSE),  dP = dO Vᵀ,  dS = P ∘ (dP - δ),  with δ of short_rows.cuh
//   over all row tiles      dV = Pᵀ dO (along with dP, if there is one row tile),  dK = scale · dSᵀ Q
//   for each row tile       dQ = scale · dS K
//
// All else passes through a ring of slots (tile/stage_ring.cuh), step by step: kStep columns of two matrices for S and
// dP, kColumns of one matrix for a gradient, which finds its lines in L2 (attention/backward/short_head.cuh).
#pragma once

#include <cstdint>

#include "attention/backward/pairs.cuh"
#include "attention/backward/row_shares.cuh"
#include "attention/backward/short_head.cuh"
#include "attention/backward/short_rows.cuh"
#include "attention/logits.cuh"
#include "attention/params/backward_params.h"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/fragment_output.cuh"
#include "tile/fragments.cuh"
#include "tile/multiply.cuh"
#include "tile/smem_layout.cuh"
#include "tile/stage_ring.cuh"
#include "tile/tile_copy.cuh"

namespace ffpa {

// Fields has Dtype; kTile, the rows and keys of a tile; kColumns, the columns of a step for a gradient.
template <class Fields>
struct BackwardMmaShortConfig : Fields {
  using Params = BackwardParams;
  using Fields::kColumns;
  using Fields::kTile;
  static constexpr int kAcross = kTile / 64;  // warps that have the same rows, and 64 keys each
  static constexpr int kWarpRows = 16;
  static constexpr int kThreads = kTile / kWarpRows * kAcross * 32;
  static constexpr int kBlocksPerSm = kTile == 64 ? 3 : 1;
  using Ring = tile::StageRing<kThreads>;

  static constexpr int kStep = 64;  // columns of a step for S or dP
  static constexpr uint32_t kSlotBytes = 2 * kTile * kStep * 2;
  static constexpr uint32_t kPairBytes = kTile * kTile * 2;  // bytes of P, or of dS, of a row tile
  static_assert(kColumns % (64 * kAcross) == 0, "a warp has whole chunks of a gradient's columns");
  static_assert(kTile * kColumns * 2 <= kSlotBytes, "a step for a gradient fits a slot");

  // Shared memory holds the slots; the ring's barriers; numbers of rows that two warps share; P and dS of each row
  // tile; a bit for each row and key; steps.
  static constexpr uint32_t kRingBytes = 128, kStepBytes = 16;
  static constexpr uint32_t kSharedNumberBytes = kAcross > 1 ? kTile * 3 * 4 : 0;
  static_assert(Ring::kBarrierBytes <= kRingBytes);

  FFPA_HOST_DEVICE static constexpr int pair_steps(int d_qk, int d_v) {
    return ceil_div(d_qk, kStep) + ceil_div(d_v, kStep);
  }
  FFPA_HOST_DEVICE static constexpr int steps(int d_qk, int d_v) {
    return pair_steps(d_qk, d_v) + 2 * ceil_div(d_qk, kColumns) + ceil_div(d_v, kColumns);
  }

  static LaunchShape launch_shape(const Params& params) {
    const AttentionParams& attention = params.attention;
    const int row_tiles = attention.group * ceil_div(attention.n_q, kTile);
    const uint32_t of_row_tile = 2 * kPairBytes + kTile / 8 + steps(attention.d_qk, attention.d_v) * kStepBytes;
    LaunchShape shape;
    shape.grid = {uint32_t(attention.batch * params.heads_kv())};
    shape.threads = kThreads;
    shape.smem_bytes =
        attention.stages * kSlotBytes + kRingBytes + kSharedNumberBytes + row_tiles * of_row_tile + 2 * kTile / 8;
    return shape;
  }
};

template <class Config>
class BackwardMmaShort : ShortRows<Config> {
  using Head = ShortRows<Config>;
  using Head::attention_, Head::params_, Head::batch_, Head::head_kv_, Head::q_, Head::k_, Head::n_q, Head::n_k;
  using Head::find_live_lines, Head::is_live, Head::p_of, Head::ds_of;
  using Head::row_tiles_, Head::has_one_tile, Head::row_tile, Head::rows_of, Head::numbers_of, Head::finish_deltas;
  using Head::steps_, Head::pair_steps_, Head::work_out_steps, Head::get_step;
  using Head::thread_, Head::lane_, Head::warp_row_, Head::part_;
  using typename Head::Part, typename Head::Step, typename Head::Rows, typename Head::RowNumbers;
  using typename Head::SumsOfRow;
  using Element = typename Config::Dtype;
  static constexpr int kTile = Config::kTile, kStep = Config::kStep, kColumns = Config::kColumns;
  static constexpr int kAcross = Config::kAcross;
  static constexpr int kFragments = 8;  // fragments of keys that a warp has
  static constexpr int kGroup = 4;      // fragments of keys whose P is computed together
  using Sums = tile::Accumulator<float>[1][kFragments];
  template <int kWidth>
  using Gradient = tile::Accumulator<float>[1][kWidth / kAcross / 8];  // a warp's lines, and its part of the columns
  using Packed = uint32_t[2 * kGroup];                                 // [fragment][half of rows], a pair of keys each

  FFPA_HOST_DEVICE static constexpr tile::RowLayout pairs_layout() { return tile::RowLayout(kTile * 2); }
  template <int kWidth>
  FFPA_HOST_DEVICE static constexpr tile::RowLayout columns_layout() {
    return tile::RowLayout(kWidth * 2);
  }

 public:
  FFPA_DEVICE explicit BackwardMmaShort(const BackwardParams& params)
      : Head(params),
        ring_(ptx::dynamic_smem() + attention_.stages * Config::kSlotBytes, ptx::dynamic_smem(), attention_.stages,
              Config::kSlotBytes) {}

  FFPA_DEVICE void run() {
    if (row_tiles_ == 0 || n_k() == 0) return;  // of a packed sequence, whose gradients are zero already
    ring_.init(thread_);
    work_out_steps(thread_);
    ptx::sync_block();
    bring_step(0);
    find_live_lines(thread_);
    ptx::sync_block();
    FFPA_NO_UNROLL
    for (int i = 1; i < ahead(); ++i) bring_step(i);
    find_pairs();
    ptx::sync_block();  // P and dS of all warps are there
    find_gradients();
  }

 private:
  FFPA_DEVICE int ahead() const { return attention_.stages - 1; }  // steps that are brought ahead

  // Brings a later step while this one is under way, and returns this one.
  FFPA_DEVICE Step begin_step(int number) {
    bring_step(number + ahead());
    return get_step(number);
  }

  // ---- steps on their way into shared memory ----

  // Starts the copies of a step, if there is one.
  FFPA_DEVICE void bring_step(int number) {
    if (number >= steps_) return;
    const Step step = get_step(number);
    const uint32_t slot = ring_.begin_fill();
    const int columns = step.chunks * tile::kChunkElements;
    const int64_t k_stride = attention_.k.row_stride;
    const tile::GmemWindow keys = {row_of(attention_.k, batch_, head_kv_, k_.begin) + step.column, k_stride, n_k(),
                                   columns};
    if (step.part == Part::kS) {
      bring<kStep>(slot, {step.lines_gmem, attention_.q.row_stride, step.lines, columns});
      bring<kStep>(slot + Config::kSlotBytes / 2, keys);
    } else if (step.part == Part::kDp) {
      bring_live<kStep>(slot, {step.lines_gmem, params_.grad_out.row_stride, step.lines, columns}, step.tile);
      bring<kStep>(slot + Config::kSlotBytes / 2, {row_of(attention_.v, batch_, head_kv_, k_.begin) + step.column,
                                                   attention_.v.row_stride, n_k(), columns});
    } else {
      const int64_t v_stride = params_.grad_out.row_stride, q_stride = attention_.q.row_stride;
      const bool of_keys = step.part == Part::kDq;
      const int64_t stride = of_keys ? k_stride : step.is_of_v() ? v_stride : q_stride;
      bring_live<kColumns>(slot, {step.lines_gmem, stride, kTile, columns}, of_keys ? row_tiles_ : step.tile);
    }
    ring_.end_fill();
  }
  template <int kWidth>
  FFPA_DEVICE void bring(uint32_t smem, const tile::GmemWindow& window) const {
    tile::copy_chunks_async<kTile, kWidth, Config::kThreads>(
        smem, columns_layout<kWidth>(), window, thread_,
        [&](int line, int chunk) { return line < window.rows && chunk * tile::kChunkElements < window.columns; },
        ptx::CallSite());
  }
  template <int kWidth>
  FFPA_DEVICE void bring_live(uint32_t smem, const tile::GmemWindow& window, int lines) const {
    tile::copy_chunks_async<kTile, kWidth, Config::kThreads>(
        smem, columns_layout<kWidth>(), window, thread_,
        [&](int line, int chunk) { return chunk * tile::kChunkElements < window.columns && is_live(lines, line); },
        ptx::CallSite());
  }

  // ---- P and dS of a row tile ----

  FFPA_DEVICE void find_pairs() {
    int number = 0;
    FFPA_NO_UNROLL
    for (int tile = 0; tile < row_tiles_; ++tile) {
      const Rows rows = rows_of(tile);
      RowNumbers numbers = numbers_of(rows);
      {
        Sums sums;
        FFPA_NO_UNROLL
        for (bool more = true; more; ++number) {
          more = !begin_step(number).ends;
          multiply(sums, ring_.begin_use());
          ring_.end_use();
        }
        finish_p_of(tile, rows, sums, numbers);
      }
      if (has_one_tile()) ptx::sync_block();  // P of all warps is there
      Sums sums;
      FFPA_NO_UNROLL
      for (bool more = true; more; ++number) {
        const Step step = begin_step(number);
        more = !step.ends;
        const uint32_t slot = ring_.begin_use();
        multiply(sums, slot);
        if (has_one_tile()) {
          Gradient<kStep> dv;
          add_to_gradient<true, kStep>(dv, p_of(tile), slot);
          write<kStep>(step, Part::kDv, dv);
        }
        ring_.end_use();
      }
      finish_ds_of(tile, rows, sums, numbers);
    }
  }

  // Adds the product of kStep columns of two matrices to S or dP.
  FFPA_DEVICE void multiply(Sums& sums, uint32_t slot) const {
    constexpr tile::RowLayout kLayout = columns_layout<kStep>();
    const uint32_t a_smem = a_of_step(slot);
    const tile::Coordinate b = tile::ldmatrix_b_pair(lane_);
    const uint32_t b_smem = slot + Config::kSlotBytes / 2 + kLayout.offset(part_ * 64 + b.row, b.column);
    tile::add_product<Element, 1, kStep / 16>(
        sums,
        [&](uint32_t (&fragment)[4], int, int depth) {
          ptx::ldmatrix_x4(fragment, kLayout.moved(a_smem, 0, depth * 2));
        },
        [&](uint32_t (&fragments)[4], int depth, int pair) {
          ptx::ldmatrix_x4(fragments, kLayout.moved(b_smem, pair * 16, depth * 2));
        });
  }
  FFPA_DEVICE uint32_t a_of_step(uint32_t slot) const {
    const tile::Coordinate a = tile::ldmatrix_a(lane_);
    return slot + columns_layout<kStep>().offset(warp_row_ + a.row, a.column);
  }

  // Calls function(smem, i) for each packed pair i of a group, and where the lane has it in a matrix of pairs.
  template <class Function>
  FFPA_DEVICE void for_pairs(uint32_t matrix_smem, int group, const Function& function) const {
    const tile::Coordinate at = tile::c_coordinate(lane_, 0);
    FFPA_UNROLL
    for (int i = 0; i < 2 * kGroup; ++i) {
      const int row = warp_row_ + at.row + i % 2 * 8, chunk = part_ * kFragments + group * kGroup + i / 2;
      function(matrix_smem + pairs_layout().offset(row, chunk) + at.column * 2, i);
    }
  }
  FFPA_DEVICE void store(uint32_t matrix_smem, int group, const Packed& pairs) const {
    for_pairs(matrix_smem, group, [&](uint32_t smem, int i) { ptx::st_shared_4(smem, pairs[i]); });
  }
  FFPA_DEVICE void load(Packed& pairs, uint32_t matrix_smem, int group) const {
    for_pairs(matrix_smem, group, [&](uint32_t smem, int i) { pairs[i] = ptx::ld_shared_4(smem); });
  }
  static FFPA_DEVICE void get(float (&values)[1][kGroup][4], const Sums& sums, int group) {
    FFPA_UNROLL
    for (int n = 0; n < kGroup; ++n) sums[0][group * kGroup + n].get(values[0][n]);
  }

  // With a softcap, P times its slopes waits in the place of dS.
  FFPA_DEVICE bool has_softcap() const { return attention_.softcap > 0; }

  FFPA_DEVICE void finish_p_of(int tile, const Rows& of_tile, const Sums& sums, RowNumbers& numbers) const {
    const RowTile rows = row_tile(of_tile, 0, kTile);
    const bool all_seen = all_rows_see(rows, 0, kTile) && rows.last - rows.first == kTile - 1;
    const auto in_base_2_or_none = [](float lse) { return lse == kInfinity ? lse : in_base_2(lse); };
    const float lse2[2] = {in_base_2_or_none(numbers.lse[0]), in_base_2_or_none(numbers.lse[1])};
    numbers.all_count = all_seen && none_blind(lse2) && are_linear(attention_, lse2);
    RowShare own;  // share of the row of the warp that has the lane's number
    if (ptx::vote_any(is_far(lse2[0]) || is_far(lse2[1]))) {
      const float low = ptx::shfl_idx(numbers.lse[0], lane_ % 8 * 4),
                  high = ptx::shfl_idx(numbers.lse[1], lane_ % 8 * 4);
      own =
          share_of_rows<Element>(attention_, row_tile(of_tile, warp_row_, 16), lane_ / 8 % 2 == 0 ? low : high, lane_);
    }
    const auto get_shares = [&](RowShare(&shares)[2]) {
      FFPA_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int source = lane_ / 4 + 8 * h;
        shares[h] = {ptx::shfl_idx(own.reference, source), ptx::shfl_idx(own.share, source)};
      }
    };
    numbers.sum[0] = numbers.sum[1] = 0;
    FFPA_UNROLL
    for (int group = 0; group < kFragments / kGroup; ++group) {
      float scores[1][kGroup][4];
      Packed p, slopes = {};
      get(scores, sums, group);
      const int row = rows.first + warp_row_, key = part_ * 64 + group * kGroup * 8;
      if (numbers.all_count) {  // there are no registers for linear exponents of other tiles
        linear_exponents<Element>(scores, attention_.score_factor, lse2);
      } else {
        exponents_by_rules<Element>(scores, attention_, rows, all_seen && none_blind(lse2), row, key, lse2, lane_,
                                    slopes, get_shares);
      }
      finish_p<Element>(scores, p, numbers.sum);
      store(p_of(tile), group, p);
      if (!has_softcap()) continue;
      apply_slopes<Element>(p, slopes, false);
      store(ds_of(tile), group, p);
    }
    FFPA_UNROLL
    for (float& sum : numbers.sum) sum = tile::sum_of_lanes(sum);
  }

  FFPA_DEVICE void finish_ds_of(int tile, const Rows& rows, const Sums& sums, const RowNumbers& numbers) const {
    float delta[2];
    find_deltas(delta, tile, rows, sums, numbers);
    FFPA_UNROLL
    for (int group = 0; group < kFragments / kGroup; ++group) {
      float dp[1][kGroup][4];
      Packed p, ds;
      get(dp, sums, group);
      load(p, has_softcap() ? ds_of(tile) : p_of(tile), group);
      finish_ds<Element>(dp, p, numbers.all_count, delta, ds);
      store(ds_of(tile), group, ds);
    }
  }

  FFPA_DEVICE void find_deltas(float (&delta)[2], int tile, const Rows& rows, const Sums& sums,
                               const RowNumbers& numbers) const {
    SumsOfRow of_rows[2] = {{numbers.sum[0], 0, 0}, {numbers.sum[1], 0, 0}};
    FFPA_UNROLL
    for (int group = 0; group < kFragments / kGroup; ++group) {
      float dp[1][kGroup][4];
      Packed p;
      get(dp, sums, group);
      load(p, p_of(tile), group);
      FFPA_UNROLL
      for (int i = 0; i < 2 * kGroup; ++i) {
        float pair[2];
        ptx::unpack<Element>(p[i], pair[0], pair[1]);
        FFPA_UNROLL
        for (int e = 0; e < 2; ++e) {
          of_rows[i % 2][1] += pair[e];
          of_rows[i % 2][2] += pair[e] == 0 ? 0.0f : pair[e] * dp[0][i / 2][i % 2 * 2 + e];  // dP may be NaN there
        }
      }
    }
    finish_deltas(delta, of_rows, rows);
  }

  // ---- gradients ----

  FFPA_DEVICE void find_gradients() {
    Gradient<kColumns> sums;
    FFPA_NO_UNROLL
    for (int number = pair_steps_; number < steps_; ++number) {
      const Step step = begin_step(number);
      const uint32_t slot = ring_.begin_use();
      if (step.is_over_rows()) {
        add_to_gradient<true, kColumns>(sums, step.part == Part::kDk ? ds_of(step.tile) : p_of(step.tile), slot);
      } else {
        add_to_gradient<false, kColumns>(sums, ds_of(step.tile), slot);
      }
      ring_.end_use();
      if (!step.ends) continue;
      write<kColumns>(step, step.part, sums);
      FFPA_UNROLL
      for (tile::Accumulator<float>& sum : sums[0]) sum = {};
    }
  }

  // Adds the product of P or dS, or of its transpose, and the first matrix in a slot.
  template <bool kTransposed, int kWidth>
  FFPA_DEVICE void add_to_gradient(Gradient<kWidth>& sums, uint32_t pairs_smem, uint32_t slot) const {
    constexpr tile::RowLayout kPairs = pairs_layout(), kLayout = columns_layout<kWidth>();
    constexpr int kOwnColumns = kWidth / kAcross;
    const tile::Coordinate a = kTransposed ? tile::ldmatrix_a_trans(lane_) : tile::ldmatrix_a(lane_);
    const tile::Coordinate b = tile::ldmatrix_b_pair_trans(lane_);
    const uint32_t a_smem =
        pairs_smem + (kTransposed ? kPairs.moved(kPairs.offset(a.row, a.column), 0, warp_row_ / tile::kChunkElements)
                                  : kPairs.offset(warp_row_ + a.row, a.column));
    const uint32_t b_smem = kLayout.moved(slot + kLayout.offset(b.row, b.column), 0, part_ * kOwnColumns / 8);
    tile::add_product<Element, 1, kTile / 16>(
        sums,
        [&](uint32_t (&fragment)[4], int, int depth) {
          if (kTransposed) {
            ptx::ldmatrix_x4_trans(fragment, kPairs.moved(a_smem, depth * 16, 0));
          } else {
            ptx::ldmatrix_x4(fragment, kPairs.moved(a_smem, 0, depth * 2));
          }
        },
        [&](uint32_t (&fragments)[4], int depth, int pair) {
          ptx::ldmatrix_x4_trans(fragments, kLayout.moved(b_smem, depth * 16, pair * 2));
        });
  }

  FFPA_DEVICE void* result_of(const GradientView& x, int64_t head, int64_t row, int column) const {
    const int64_t at = batch_ * x.batch_stride + head * x.head_stride + row * x.row_stride + column;
    return static_cast<uint8_t*>(x.data) + at * (params_.float_gradients ? 4 : 2);
  }

  // Writes what a step has given of the gradient that `part` is about.
  template <int kWidth>
  FFPA_DEVICE void write(const Step& step, Part part, const Gradient<kWidth>& sums) const {
    const bool of_q = part == Part::kDq, of_v = part == Part::kDv;
    const int64_t q_stride = params_.dq.row_stride, k_stride = params_.dk.row_stride, v_stride = params_.dv.row_stride;
    const int64_t row_stride = of_q ? q_stride : of_v ? v_stride : k_stride;
    const float scale = of_v ? kUnitOfP<Element> : attention_.scale;
    constexpr int kOwnColumns = kWidth / kAcross;
    const Rows rows = rows_of(step.tile);
    const int first_column = part_ * kOwnColumns, column = step.column + first_column;
    const int head = of_q ? rows.head : head_kv_, row = (of_q ? q_.begin + rows.first : k_.begin) + warp_row_;
    void* of_q_gmem = result_of(params_.dq, head, row, column);
    void* of_k_gmem = result_of(params_.dk, head, row, column);
    void* of_v_gmem = result_of(params_.dv, head, row, column);
    void* gmem = of_q ? of_q_gmem : of_v ? of_v_gmem : of_k_gmem;
    tile::RowWriter<Element, kOwnColumns / 8> writer({gmem, row_stride, (of_q ? step.lines : n_k()) - warp_row_},
                                                     step.chunks * tile::kChunkElements - first_column,
                                                     params_.float_gradients, lane_);
    FFPA_UNROLL
    for (int n = 0; n < kOwnColumns / 8; ++n) {
      float values[4];
      sums[0][n].get(values);
      FFPA_UNROLL
      for (float& value : values) value *= scale;
      writer.put(n, values);
    }
  }

  typename Config::Ring ring_;
};

template <class Config>
FFPA_KERNEL(Config::kThreads, Config::kBlocksPerSm)
void backward_mma_short(FFPA_GRID_CONSTANT const BackwardParams params) {
  BackwardMmaShort<Config>(params).run();
}

}  // namespace ffpa
