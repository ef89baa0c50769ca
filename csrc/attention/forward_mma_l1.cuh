// Split-D attention forward, level 1: the whole O row block stays in registers, spread over 8 warps along the head dim.
//
// One block of threads computes kRows rows of one query head. For each tile of kKeys keys:
//
//   1. S = Q Kᵀ      in steps of kKeyColumns columns of the head dim, accumulated in registers;
//   2. softmax       row maxima meet in shared memory; P goes to shared memory as 16-bit numbers;
//   3. O = αO + P V  in steps of kValueRows keys, each over the whole width of O.
//
// The warps split S by 32 × 32 and O by columns: two different grids, which is why P crosses shared memory. K and V
// steps come through one ring of 1 … 4 slots; before a step is used, everybody waits for it at one barrier, and that
// barrier also says that the slot used before is free. Only the V steps and O depend on the head dim of V; that of Q
// and K is a loop count.
#pragma once

#include "attention/attention_params.h"
#include "attention/score_rules.cuh"
#include "attention/visible_keys.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/async_copy.cuh"
#include "ptx/barrier.cuh"
#include "ptx/launch_types.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/warp.cuh"
#include "tile/fragments.cuh"
#include "tile/smem_layout.cuh"
#include "tile/stage_ring.cuh"
#include "tile/tile_copy.cuh"

namespace ffpa {

// Fields: Dtype; kHeadDim, the columns of O (d_v rounded up); kRows and kKeys of a tile.
template <class Fields>
struct ForwardMmaL1Config : Fields {
  using Params = AttentionParams;
  using Fields::kHeadDim;
  using Fields::kKeys;
  using Fields::kRows;

  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kMinBlocksPerSm = 1;

  // S: each warp has 32 rows × 32 keys.
  static constexpr int kScoreWarpRows = 32;
  static constexpr int kScoreWarpKeys = 32;
  static constexpr int kScoreWarpsByKeys = kKeys / kScoreWarpKeys;
  static_assert(kRows / kScoreWarpRows * kScoreWarpsByKeys == kWarps,
                "a tile has one 32 × 32 block of S for each warp");

  // O: as few warps along the rows as registers allow, since each warp reads its columns of V once for all its rows.
  static constexpr int kOutWarpsByRows = kRows == 32 ? 1 : 2;
  static constexpr int kOutWarpsByColumns = kWarps / kOutWarpsByRows;
  static constexpr int kOutWarpRows = kRows / kOutWarpsByRows;
  static constexpr int kOutWarpColumns = kHeadDim / kOutWarpsByColumns;
  static_assert(kHeadDim % 64 == 0, "every warp has a whole number of 8-column fragments of O");

  // A step is what one barrier of the ring covers: about 32 KB, or the whole tile where that is less.
  static constexpr int kStepBytes = 32 * 1024;
  static constexpr int kKeyColumns = min_of(kStepBytes / (kKeys * 2), 128);
  static constexpr int kValueRows = kHeadDim <= 128 ? 64 : kHeadDim <= 512 ? 32 : 16;
  static_assert(kKeys % kValueRows == 0, "a tile is a whole number of V steps");

  // Shared memory: slots, then P, then row statistics, then Q where it is resident.
  static constexpr uint32_t kKeyStepBytes = kKeys * kKeyColumns * 2;
  static constexpr uint32_t kQueryStepBytes = kRows * kKeyColumns * 2;
  static constexpr uint32_t kValueStepBytes = kValueRows * kHeadDim * 2;
  static constexpr uint32_t kProbabilityBytes = kRows * kKeys * 2;
  static constexpr uint32_t kStatisticBytes = kRows * sizeof(float);

  FFPA_HOST_DEVICE static int key_steps(const Params& params) { return ceil_div(params.d_qk, kKeyColumns); }

  FFPA_HOST_DEVICE static uint32_t slot_bytes(const Params& params) {
    return max_of(kKeyStepBytes + (params.q_resident ? 0 : kQueryStepBytes), kValueStepBytes);
  }

  static uint32_t smem_bytes(const Params& params) {
    return params.stages * slot_bytes(params) + kProbabilityBytes + (kScoreWarpsByKeys + 1) * kStatisticBytes +
           (params.q_resident ? key_steps(params) * kQueryStepBytes : 0);
  }

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape;
    shape.grid.x = uint32_t(ceil_div(params.n_q, kRows)) * uint32_t(params.batch * params.heads_q);
    shape.threads = kThreads;
    shape.smem_bytes = smem_bytes(params);
    return shape;
  }
};

template <class Config>
FFPA_KERNEL(Config::kThreads, Config::kMinBlocksPerSm)
void forward_mma_l1(FFPA_GRID_CONSTANT const AttentionParams params) {
  using Element = typename Config::Dtype;
  constexpr int kRows = Config::kRows;
  constexpr int kKeys = Config::kKeys;
  constexpr int kKeyColumns = Config::kKeyColumns;
  constexpr int kValueRows = Config::kValueRows;
  constexpr int kValueSteps = kKeys / kValueRows;
  constexpr tile::SwizzledLayout kStepLayout(kKeyColumns * 2);        // K and Q steps: [keys or rows][kKeyColumns]
  constexpr tile::SwizzledLayout kValueLayout(Config::kHeadDim * 2);  // V steps: [kValueRows][kHeadDim]
  constexpr tile::SwizzledLayout kProbabilityLayout(kKeys * 2);       // P: [kRows][kKeys]

  const int thread = ptx::thread_x();
  const int warp = thread / 32;
  const int lane = ptx::lane_id();

  // The last row blocks come first: under a causal mask they are the longest.
  const int row_blocks = ceil_div(params.n_q, kRows);
  const int head_of_all = ptx::block_x() / row_blocks;
  const int first_row = (row_blocks - 1 - ptx::block_x() % row_blocks) * kRows;
  const int64_t batch = head_of_all / params.heads_q;
  const int64_t head = head_of_all % params.heads_q;
  const auto matrix = [&](const TensorView& x, int64_t of_head, int rows, int columns) {
    const uint16_t* origin = x.data + batch * x.batch_stride + of_head * x.head_stride;
    return tile::GmemWindow{origin, x.row_stride, rows, columns};
  };
  const tile::GmemWindow q_gmem = tile::window_at(matrix(params.q, head, params.n_q, params.d_qk), first_row, 0);
  const tile::GmemWindow k_gmem = matrix(params.k, head / params.group, params.n_k, params.d_qk);
  const tile::GmemWindow v_gmem = matrix(params.v, head / params.group, params.n_k, params.d_v);

  const VisibleKeys visible(params, first_row, min_of(first_row + kRows, params.n_q) - 1);
  const int first_tile = visible.begin() / kKeys;
  const int tiles = max_of(ceil_div(visible.end(), kKeys) - first_tile, 0);

  const uint32_t slots_smem = ptx::dynamic_smem();
  const uint32_t slot_bytes = Config::slot_bytes(params);
  const uint32_t p_smem = slots_smem + params.stages * slot_bytes;
  const uint32_t partial_smem = p_smem + Config::kProbabilityBytes;  // [kScoreWarpsByKeys][kRows]: maxima, sums
  const uint32_t factor_smem =
      partial_smem + Config::kScoreWarpsByKeys * Config::kStatisticBytes;  // [kRows]: α, maxima
  const uint32_t q_smem = factor_smem + Config::kStatisticBytes;           // resident Q: [key step][kRows][kKeyColumns]

  // ---- the ring ----

  const int key_steps = Config::key_steps(params);
  const int stages = params.stages;
  int load_tile = first_tile, load_step = 0;  // what the next copy brings
  tile::StageRing load_ring(stages, slot_bytes), use_ring(stages, slot_bytes);

  // Starts the copy of the next step, if any, and closes the group: one group a step, empty after the last.
  const auto load_next_step = [&] {
    if (load_tile < first_tile + tiles) {
      const uint32_t slot = slots_smem + load_ring.offset();
      const int key = load_tile * kKeys;
      if (load_step < key_steps) {
        const int column = load_step * kKeyColumns;
        tile::copy_tile_async<kKeys, kKeyColumns, Config::kThreads>(slot, kStepLayout,
                                                                    tile::window_at(k_gmem, key, column), thread);
        if (!params.q_resident) {
          tile::copy_tile_async<kRows, kKeyColumns, Config::kThreads>(slot + Config::kKeyStepBytes, kStepLayout,
                                                                      tile::window_at(q_gmem, 0, column), thread);
        }
      } else {
        const int value_row = key + (load_step - key_steps) * kValueRows;
        tile::copy_tile_async<kValueRows, Config::kHeadDim, Config::kThreads>(
            slot, kValueLayout, tile::window_at(v_gmem, value_row, 0), thread);
      }
      load_ring.advance();
      if (++load_step == key_steps + kValueSteps) {
        load_step = 0;
        ++load_tile;
      }
    }
    ptx::cp_async_commit_group();
  };

  // The slot of the next step, with its data there for every thread.
  const auto next_slot = [&] {
    if (stages == 1) {
      ptx::sync_block();  // everybody has used the only slot
      load_next_step();
      tile::wait_for_copies(0);
      ptx::sync_block();  // everybody's copies have landed
    } else {
      tile::wait_for_copies(stages - 2);
      ptx::sync_block();  // everybody's copies have landed, and everybody has used the slot before this one
      load_next_step();   // into that slot
    }
    const uint32_t slot = slots_smem + use_ring.offset();
    use_ring.advance();
    return slot;
  };

  if (params.q_resident && tiles > 0) {
    for (int step = 0; step < key_steps; ++step) {
      tile::copy_tile_async<kRows, kKeyColumns, Config::kThreads>(
          q_smem + step * Config::kQueryStepBytes, kStepLayout, tile::window_at(q_gmem, 0, step * kKeyColumns), thread);
    }
  }
  for (int step = 0; step < stages - 1; ++step) load_next_step();  // Q belongs to the first group

  // ---- this thread's share of S and O ----

  // S [32 rows × 32 keys of the warp]: C fragments s[16 rows][8 keys]; rows 16m + 8h + lane / 4 have statistics [m][h].
  const int score_row = warp / Config::kScoreWarpsByKeys * Config::kScoreWarpRows;
  const int score_key = warp % Config::kScoreWarpsByKeys * Config::kScoreWarpKeys;
  constexpr int kScoreM = Config::kScoreWarpRows / 16, kScoreN = Config::kScoreWarpKeys / 8;
  float row_max[kScoreM][2], row_sum[kScoreM][2];  // in base 2; the sum over this thread's keys alone
  FFPA_UNROLL
  for (int m = 0; m < kScoreM; ++m) {
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      row_max[m][h] = -kInfinity;
      row_sum[m][h] = 0;
    }
  }

  // O [kOutWarpRows × kOutWarpColumns of the warp]: C fragments o[16 rows][8 columns].
  const int out_row = warp / Config::kOutWarpsByColumns * Config::kOutWarpRows;
  const int out_column = warp % Config::kOutWarpsByColumns * Config::kOutWarpColumns;
  constexpr int kOutM = Config::kOutWarpRows / 16, kOutN = Config::kOutWarpColumns / 8;
  float o[kOutM][kOutN][4];
  FFPA_UNROLL
  for (int m = 0; m < kOutM; ++m) {
    FFPA_UNROLL
    for (int n = 0; n < kOutN; ++n) {
      FFPA_UNROLL
      for (int e = 0; e < 4; ++e) o[m][n][e] = 0;
    }
  }
  const auto statistic = [](uint32_t base, int row) { return base + row * uint32_t(sizeof(float)); };

  for (int tile_index = first_tile; tile_index < first_tile + tiles; ++tile_index) {
    // ---- 1. S = Q Kᵀ ----

    float s[kScoreM][kScoreN][4];
    FFPA_UNROLL
    for (int m = 0; m < kScoreM; ++m) {
      FFPA_UNROLL
      for (int n = 0; n < kScoreN; ++n) {
        FFPA_UNROLL
        for (int e = 0; e < 4; ++e) s[m][n][e] = 0;
      }
    }
    for (int step = 0; step < key_steps; ++step) {
      const uint32_t k_slot = next_slot();
      const uint32_t q_slot =
          params.q_resident ? q_smem + step * Config::kQueryStepBytes : k_slot + Config::kKeyStepBytes;
      const int columns = params.d_qk - step * kKeyColumns;  // beyond them there are zeros only
      FFPA_NO_UNROLL                                         // unrolled, addresses take the registers that O needs
          for (int depth = 0; depth < min_of(kKeyColumns, columns); depth += 16) {
        uint32_t a[kScoreM][4];
        FFPA_UNROLL
        for (int m = 0; m < kScoreM; ++m) {
          const tile::Coordinate at = tile::ldmatrix_a(lane);
          ptx::ldmatrix_x4(a[m], q_slot + kStepLayout.offset(score_row + m * 16 + at.row, depth / 8 + at.column));
        }
        FFPA_UNROLL
        for (int n = 0; n < kScoreN; n += 2) {
          uint32_t b[4];
          const tile::Coordinate at = tile::ldmatrix_b_pair(lane);
          ptx::ldmatrix_x4(b, k_slot + kStepLayout.offset(score_key + n * 8 + at.row, depth / 8 + at.column));
          FFPA_UNROLL
          for (int m = 0; m < kScoreM; ++m) {
            ptx::mma_m16n8k16_f32<Element>(s[m][n], a[m], b[0], b[1]);
            ptx::mma_m16n8k16_f32<Element>(s[m][n + 1], a[m], b[2], b[3]);
          }
        }
      }
    }

    // ---- 2. softmax ----

    const int first_key = tile_index * kKeys;
    scores_to_logits(s, params, int(batch), int(head), visible.all_see(first_key, kKeys), first_row + score_row,
                     first_key + score_key, lane);
    FFPA_UNROLL
    for (int m = 0; m < kScoreM; ++m) {
      FFPA_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int row = score_row + m * 16 + tile::c_coordinate(lane, 2 * h).row;
        float tile_max = -kInfinity;
        FFPA_UNROLL
        for (int n = 0; n < kScoreN; ++n) {
          FFPA_UNROLL
          for (int e = 0; e < 2; ++e) tile_max = max_of(tile_max, s[m][n][2 * h + e]);
        }
        tile_max = max_of(tile_max, ptx::shfl_xor(tile_max, 1));
        tile_max = max_of(tile_max, ptx::shfl_xor(tile_max, 2));
        if (lane % 4 == 0) {
          const int by_keys = warp % Config::kScoreWarpsByKeys;
          ptx::st_shared_4(statistic(partial_smem, by_keys * kRows + row), float_bits(tile_max));
        }
      }
    }
    ptx::sync_block();  // the maxima of all warps over a row are there
    FFPA_UNROLL
    for (int m = 0; m < kScoreM; ++m) {
      FFPA_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int row = score_row + m * 16 + tile::c_coordinate(lane, 2 * h).row;
        float new_max = row_max[m][h];
        FFPA_UNROLL
        for (int by_keys = 0; by_keys < Config::kScoreWarpsByKeys; ++by_keys) {
          new_max = max_of(new_max, float_from_bits(ptx::ld_shared_4(statistic(partial_smem, by_keys * kRows + row))));
        }
        const float reference = new_max == -kInfinity ? 0.0f : new_max;  // a row that has seen no key yet: P = 0
        const float factor = ptx::ex2(row_max[m][h] - reference);
        row_max[m][h] = new_max;
        if (warp % Config::kScoreWarpsByKeys == 0 && lane % 4 == 0) {
          ptx::st_shared_4(statistic(factor_smem, row), float_bits(factor));
        }
        float tile_sum = 0;
        FFPA_UNROLL
        for (int n = 0; n < kScoreN; ++n) {
          const float p0 = ptx::ex2(s[m][n][2 * h] - reference);
          const float p1 = ptx::ex2(s[m][n][2 * h + 1] - reference);
          tile_sum += p0 + p1;
          const int chunk = (score_key + n * 8) / tile::kChunkElements;
          const uint32_t within_chunk = tile::c_coordinate(lane, 0).column * 2;
          ptx::st_shared_4(p_smem + kProbabilityLayout.offset(row, chunk) + within_chunk, ptx::pack<Element>(p0, p1));
        }
        row_sum[m][h] = row_sum[m][h] * factor + tile_sum;
      }
    }

    // ---- 3. O = αO + P V ----

    for (int step = 0; step < kValueSteps; ++step) {
      const uint32_t v_slot = next_slot();  // its barrier also covers P and α
      if (step == 0) {
        FFPA_UNROLL
        for (int m = 0; m < kOutM; ++m) {
          FFPA_UNROLL
          for (int h = 0; h < 2; ++h) {
            const int row = out_row + m * 16 + tile::c_coordinate(lane, 2 * h).row;
            const float factor = float_from_bits(ptx::ld_shared_4(statistic(factor_smem, row)));
            FFPA_UNROLL
            for (int n = 0; n < kOutN; ++n) {
              o[m][n][2 * h] *= factor;
              o[m][n][2 * h + 1] *= factor;
            }
          }
        }
      }
      FFPA_UNROLL
      for (int depth = 0; depth < kValueRows / 16; ++depth) {
        const int p_chunk = (step * kValueRows + depth * 16) / tile::kChunkElements;
        uint32_t a[kOutM][4];
        FFPA_UNROLL
        for (int m = 0; m < kOutM; ++m) {
          const tile::Coordinate at = tile::ldmatrix_a(lane);
          ptx::ldmatrix_x4(a[m], p_smem + kProbabilityLayout.offset(out_row + m * 16 + at.row, p_chunk + at.column));
        }
        FFPA_UNROLL
        for (int n = 0; n < kOutN; n += 2) {
          const int v_chunk = out_column / tile::kChunkElements + n;
          uint32_t b[4];
          if (n + 1 < kOutN) {
            const tile::Coordinate at = tile::ldmatrix_b_pair_trans(lane);
            ptx::ldmatrix_x4_trans(b, v_slot + kValueLayout.offset(depth * 16 + at.row, v_chunk + at.column));
          } else {  // an odd number of fragments: the last one alone
            uint32_t last[2];
            const tile::Coordinate at = tile::ldmatrix_b_trans(lane);
            ptx::ldmatrix_x2_trans(last, v_slot + kValueLayout.offset(depth * 16 + at.row, v_chunk + at.column));
            b[0] = last[0];
            b[1] = last[1];
          }
          FFPA_UNROLL
          for (int m = 0; m < kOutM; ++m) {
            ptx::mma_m16n8k16_f32<Element>(o[m][n], a[m], b[0], b[1]);
            if (n + 1 < kOutN) ptx::mma_m16n8k16_f32<Element>(o[m][n + 1], a[m], b[2], b[3]);
          }
        }
      }
    }
  }

  // ---- out = O / row sum, LSE ----

  FFPA_UNROLL
  for (int m = 0; m < kScoreM; ++m) {
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      float sum = row_sum[m][h];
      sum += ptx::shfl_xor(sum, 1);
      sum += ptx::shfl_xor(sum, 2);
      if (lane % 4 == 0) {
        const int row = score_row + m * 16 + tile::c_coordinate(lane, 2 * h).row;
        const int by_keys = warp % Config::kScoreWarpsByKeys;
        ptx::st_shared_4(statistic(partial_smem, by_keys * kRows + row), float_bits(sum));
      }
    }
  }
  ptx::sync_block();  // the sums of all warps are there, and nobody reads α any more
  const auto whole_row_sum = [&](int row) {
    float sum = 0;
    FFPA_UNROLL
    for (int by_keys = 0; by_keys < Config::kScoreWarpsByKeys; ++by_keys) {
      sum += float_from_bits(ptx::ld_shared_4(statistic(partial_smem, by_keys * kRows + row)));
    }
    return sum;
  };

  if (params.lse != nullptr && warp % Config::kScoreWarpsByKeys == 0 && lane % 4 == 0) {
    FFPA_UNROLL
    for (int m = 0; m < kScoreM; ++m) {
      FFPA_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int row = score_row + m * 16 + tile::c_coordinate(lane, 2 * h).row;
        if (first_row + row < params.n_q) {
          const float lse = (row_max[m][h] + ptx::lg2(whole_row_sum(row))) * kLn2;  // no key: -inf + -inf
          ptx::st_global_4(params.lse + int64_t(head_of_all) * params.n_q + first_row + row, float_bits(lse));
        }
      }
    }
  }

  uint16_t* out_gmem = params.out.data + batch * params.out.batch_stride + head * params.out.head_stride;
  FFPA_UNROLL
  for (int m = 0; m < kOutM; ++m) {
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int row = out_row + m * 16 + tile::c_coordinate(lane, 2 * h).row;
      const float sum = whole_row_sum(row);
      const float inverse = sum > 0 ? 1 / sum : 0.0f;
      if (first_row + row >= params.n_q) continue;
      uint16_t* out_row_gmem = out_gmem + int64_t(first_row + row) * params.out.row_stride;
      FFPA_UNROLL
      for (int n = 0; n < kOutN; ++n) {
        const int column = out_column + n * 8 + tile::c_coordinate(lane, 0).column;
        if (column < params.d_v) {
          ptx::st_global_4(out_row_gmem + column,
                           ptx::pack<Element>(o[m][n][2 * h] * inverse, o[m][n][2 * h + 1] * inverse));
        }
      }
    }
  }
}

}  // namespace ffpa
