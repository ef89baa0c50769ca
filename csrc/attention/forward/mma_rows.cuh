// Attention forward for small head dims: each warp owns whole rows, so that S, P and O never leave its registers.
//
// A block of threads has a row tile of kRows rows, each warp kRows / kWarps of them. For each tile of kKeys keys:
//
//   1. S = Q Kᵀ      over the whole head dim, unrolled;
//   2. softmax       row maxima by shuffles among the four lanes of a row; O follows only a maximum that grew a lot;
//   3. O += P V      P = exp2(S - maximum) is computed 16 keys at a time, under the products of the 16 keys before.
//
// K and V tiles come whole through rings of 1 … 4 slots each. Each tile has two barriers: one before K is used, one
// before V; each also says that the other operand's last tile has been used, and the copy of its next one starts then.
#pragma once

#include <type_traits>

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
#include "ptx/launch_types.h"
#include "tile/fragments.cuh"
#include "tile/multiply.cuh"
#include "tile/smem_layout.cuh"
#include "tile/tile_copy.cuh"

namespace ffpa {

// Fields has Dtype; AccQk and AccPv, what products accumulate in; kHeadDim, which d_qk and d_v are rounded up to; kRows
// and kKeys of a tile; kQInRegisters, whether the fragments of Q stay in registers or are read again for each tile;
// kSerial, whether fragments are loaded when they are needed and not ahead; kPaged, whether keys lie in pages.
template <class Fields>
struct ForwardMmaRowsConfig : Fields {
  using Params = AttentionParams;
  using Fields::kHeadDim;
  using Fields::kKeys;
  using Fields::kRows;

  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kMinBlocksPerSm = 2;
  static constexpr int kWarpRows = kRows / kWarps;
  static_assert(kWarpRows % 16 == 0 && kWarpRows * kWarps == kRows, "warps own whole fragments of rows");
  static_assert(kKeys % 16 == 0 && kHeadDim % 32 == 0, "K and V are read in fragments of 16 × 16");

  // Products that need more than a positive factor become scores first, which takes registers that two fragments of
  // rows do not leave.
  static constexpr bool kRules = kWarpRows == 16;

  // B fragments are loaded kAhead pairs before their products: about one latency of ldmatrix.
  static constexpr int kAhead = Fields::kSerial ? 0 : kWarpRows == 16 ? 2 : 1;

  // Shared memory holds Q, then K of each stage, then V of each stage, then the row tile.
  static constexpr uint32_t kQueryBytes = kRows * kHeadDim * 2;
  static constexpr uint32_t kTileBytes = kKeys * kHeadDim * 2;

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape;
    shape.grid = grid_of(params, RowTiles<kRows>(params).count());
    shape.threads = kThreads;
    shape.smem_bytes = kQueryBytes + params.stages * 2 * kTileBytes + KeptRows::kBytes;
    return shape;
  }

  using Arguments = MmaArguments<kRows, Fields::kPaged>;
};

// Waits until at most `pending` (0, 2, 4 or 6) of this thread's latest copy groups are in flight.
FFPA_DEVICE void wait_for_copy_groups(int pending) {
  switch (pending) {
    case 2:
      ptx::cp_async_wait_group<2>();
      break;
    case 4:
      ptx::cp_async_wait_group<4>();
      break;
    case 6:
      ptx::cp_async_wait_group<6>();
      break;
    default:
      ptx::cp_async_wait_group<0>();
      break;
  }
}

template <class Config>
FFPA_KERNEL(Config::kThreads, Config::kMinBlocksPerSm)
void forward_mma_rows(FFPA_GRID_CONSTANT const typename Config::Arguments arguments) {
  using Element = typename Config::Dtype;
  constexpr int kHeadDim = Config::kHeadDim;
  constexpr int kRows = Config::kRows;
  constexpr int kKeys = Config::kKeys;
  constexpr int kWarpRows = Config::kWarpRows;
  constexpr tile::RowLayout kLayout(kHeadDim * 2);  // Q, K and V: [rows or keys][kHeadDim]

  const AttentionParams& params = arguments.params;
  const int thread = ptx::thread_x();
  const int warp = thread / 32;
  const int lane = ptx::lane_id();

  const int stages = params.stages;
  const uint32_t q_smem = ptx::dynamic_smem();
  const uint32_t k_slots_smem = q_smem + Config::kQueryBytes;
  const uint32_t v_slots_smem = k_slots_smem + stages * Config::kTileBytes;
  const KeptRows kept(v_slots_smem + stages * Config::kTileBytes);

  // ---- what this block of threads computes ----

  SharedRowTile rows = arguments.row_tiles.get(params, block_number());
  if (warp == 0) kept.keep(rows, lane);
  ptx::sync_block();  // the row tile is there
  const MmaKeys<Config::kPaged> keys = mma_keys<Config::kPaged>(params, rows);
  const auto k_gmem = window_of_k(params, keys), v_gmem = window_of_v(params, keys);
  const TileRange tiles = visible_part(rows, kKeys, params);
  const int first_tile = tiles.first, end_tile = tiles.end;
  const int common_begin = common_keys_begin(rows), common_end = common_keys_end(rows);

  // ---- the copies into shared memory ----

  // Starts the copy of a tile of K or V, if there is one, and closes the group: one group for each tile of either.
  const auto load_tile = [&](const auto& matrix_gmem, uint32_t slot, int index) {
    if (index < end_tile) {
      if constexpr (Config::kPaged) {
        const int key = index * kKeys;
        const int page = page_of_lane<kKeys>(arguments.key_pages, params.paged, keys, key, lane);
        copy_paged_keys_async<kKeys, kHeadDim, Config::kThreads>(
            slot, kLayout, matrix_gmem,
            run_of_lane(arguments.key_pages, params.paged, keys, matrix_gmem, page, key, lane), 0, key, 0, thread);
      } else {
        tile::copy_mostly_whole_tile_async<kKeys, kHeadDim, Config::kThreads>(
            slot, kLayout, tile::window_at(matrix_gmem, index * kKeys, 0), thread);
      }
    }
    ptx::cp_async_commit_group();
  };
  // Waits for the next tile: the oldest of the 2 · stages - 1 tiles whose copies run, in the order of use, K V K V ….
  const auto wait_for_next_tile = [&] {
    wait_for_copy_groups(2 * stages - 2);
    ptx::sync_block();
  };

  if (first_tile < end_tile) {
    copy_queries_async<kRows, kHeadDim, Config::kThreads>(q_smem, kLayout, params, rows, 0, thread);
  }
  load_tile(k_gmem, k_slots_smem, first_tile);  // Q belongs to its group
  for (int ahead = 1; ahead < stages; ++ahead) {
    load_tile(v_gmem, v_slots_smem + (ahead - 1) * Config::kTileBytes, first_tile + ahead - 1);
    load_tile(k_gmem, k_slots_smem + ahead * Config::kTileBytes, first_tile + ahead);
  }

  // ---- this warp's rows ----

  const int warp_row = warp * kWarpRows;
  constexpr int kM = kWarpRows / 16, kScoreN = kKeys / 8, kOutN = kHeadDim / 8;
  constexpr int kScoreDepths = kHeadDim / 16, kOutDepths = kKeys / 16;

  tile::Accumulator<typename Config::AccPv> o[kM][kOutN];
  RowState states[kM];  // state m is that of the rows 16m + 8h + lane / 4 of the warp
  constexpr float kGrowth = kLazyGrowth<typename Config::AccPv>;
  const Slopes slopes = Config::kRules ? slopes_of(params) : Slopes::of(params.score_factor);
  RowExponents exponents[kM][2];  // they change where the references do
  tile::for_each_row<kM>([&](int m, int h) { exponents[m][h] = RowExponents::of(slopes, states[m].reference[h]); });

  // The addresses of a lane, from which every fragment lies at a constant distance.
  const auto lane_address = [&](tile::Coordinate at, int row) { return kLayout.offset(row + at.row, at.column); };
  const uint32_t q_lane_smem = q_smem + lane_address(tile::ldmatrix_a(lane), warp_row);
  const uint32_t k_lane_smem = k_slots_smem + lane_address(tile::ldmatrix_b_pair(lane), 0);
  const uint32_t v_lane_smem = v_slots_smem + lane_address(tile::ldmatrix_b_pair_trans(lane), 0);

  const auto load_q = [&](uint32_t (&fragment)[4], int m, int depth) {
    ptx::ldmatrix_x4(fragment, kLayout.moved(q_lane_smem, m * 16, depth * 2));
  };
  uint32_t q[Config::kQInRegisters ? kScoreDepths : 1][kM][4];
  if (Config::kQInRegisters && first_tile < end_tile) {
    wait_for_next_tile();
    FFPA_UNROLL
    for (int depth = 0; depth < kScoreDepths; ++depth) {
      FFPA_UNROLL
      for (int m = 0; m < kM; ++m) load_q(q[Config::kQInRegisters ? depth : 0][m], m, depth);
    }
  }

  uint32_t slot = 0, slot_before = (stages - 1) * Config::kTileBytes;  // offsets of this tile and the one before
  const auto next_keys = [&](int tile_index) {
    wait_for_next_tile();  // K of this tile is there; everybody has used V of the tile before
    load_tile(v_gmem, v_slots_smem + slot_before, tile_index + stages - 1);
  };
  const auto next_values = [&](int tile_index) {
    wait_for_next_tile();  // V of this tile is there; everybody has used K of this tile
    load_tile(k_gmem, k_slots_smem + slot, tile_index + stages);
  };
  const auto end_tile_of_keys = [&] {
    slot_before = slot;
    slot = slot == (stages - 1) * Config::kTileBytes ? 0 : slot + Config::kTileBytes;
  };

  if (kRows == 64 && !has_row(rows, warp_row)) {  // the warp copies for others, and multiplies nothing
    for (int tile_index = first_tile; tile_index < end_tile; ++tile_index) {
      next_keys(tile_index);
      next_values(tile_index);
      end_tile_of_keys();
    }
    return;
  }
  for (int tile_index = first_tile; tile_index < end_tile; ++tile_index) {
    // ---- 1. S = Q Kᵀ ----

    next_keys(tile_index);
    tile::Accumulator<typename Config::AccQk> products[kM][kScoreN];
    tile::add_product<Element, Config::kAhead, kScoreDepths>(
        products,
        [&](uint32_t (&fragment)[4], int m, int depth) {
          if (Config::kQInRegisters) {
            FFPA_UNROLL
            for (int r = 0; r < 4; ++r) fragment[r] = q[depth][m][r];
          } else {
            load_q(fragment, m, depth);
          }
        },
        [&](uint32_t (&fragments)[4], int depth, int pair) {
          ptx::ldmatrix_x4(fragments, kLayout.moved(k_lane_smem + slot, pair * 16, depth * 2));
        });

    // ---- 2. softmax ----

    float s[kM][kScoreN][4];
    FFPA_UNROLL
    for (int m = 0; m < kM; ++m) {
      FFPA_UNROLL
      for (int n = 0; n < kScoreN; ++n) products[m][n].get(s[m][n]);
    }
    const int first_key = tile_index * kKeys;
    const bool all_seen = first_key >= common_begin && first_key + kKeys <= common_end;
    if (!Config::kRules) {
      if (!all_seen) hide_unseen(s, kept.get(), warp_row, first_key, lane);
    } else if (!are_plain(params, all_seen)) {
      apply_rules<kRulesOf<Config::kPaged>>(s, params, kept.get(), all_seen, warp_row, first_key, lane);
    }

    float maxima[kM][2];
    bool lag = false;
    tile::for_each_row<kM>([&](int m, int h) { maxima[m][h] = tile::largest_of_lanes(largest_of_thread(s[m], h)); });
    if (params.largest != nullptr) {
      FFPA_UNROLL
      for (int m = 0; m < kM; ++m) {
        RowState of_tile;  // two fragments of rows leave no registers for what is told at the end: so each tile tells
        (kM > 1 ? of_tile : states[m]).keep_largest(maxima[m], params, lane);
        if (kM > 1) tell_if_asked(of_tile, params, kept.get(), warp_row + m * 16);
      }
    }
    tile::for_each_row<kM>([&](int m, int h) {
      maxima[m][h] = slopes.logit(maxima[m][h]);
      lag |= states[m].lags(h, maxima[m][h], kGrowth);
    });
    if (ptx::vote_any(lag)) {
      FFPA_UNROLL
      for (int m = 0; m < kM; ++m) {
        float factor[2];
        FFPA_UNROLL
        for (int h = 0; h < 2; ++h) {
          const float before = states[m].reference[h];
          states[m].follow(h, maxima[m][h], kGrowth);
          factor[h] = growth(before, states[m].reference[h]);
          exponents[m][h] = RowExponents::of(slopes, states[m].reference[h]);
        }
        FFPA_UNROLL
        for (int n = 0; n < kOutN; ++n) tile::scale_rows(o[m][n], factor);
      }
    }

    // ---- 3. O += P V ----

    next_values(tile_index);
    tile::add_product<Element, Config::kAhead, kOutDepths>(
        o,
        [&](uint32_t (&fragment)[4], int m, int depth) {
          float p[2][4];
          FFPA_UNROLL
          for (int half = 0; half < 2; ++half) {
            FFPA_UNROLL
            for (int e = 0; e < 4; ++e) {
              p[half][e] = exponents[m][e / 2].p(s[m][2 * depth + half][e]);
              states[m].sum[e / 2] += p[half][e];
            }
          }
          tile::pack_c_pair_as_a<Element>(fragment, p[0], p[1]);
        },
        [&](uint32_t (&fragments)[4], int depth, int pair) {
          ptx::ldmatrix_x4_trans(fragments, kLayout.moved(v_lane_smem + slot, depth * 16, pair * 2));
        });

    end_tile_of_keys();
  }

  // ---- out = O / row sum, LSE ----

  rows = kept.get();
  const auto write = [&](auto parts) {
    FFPA_UNROLL
    for (int m = 0; m < kM; ++m) {
      const int first_row = warp_row + m * 16;
      finish_rows(params, rows, first_row, states[m], lane);
      auto writer = out_writer<Element, kOutN, decltype(parts)::value>(params, rows, first_row, 0, lane);
      FFPA_UNROLL
      for (int n = 0; n < kOutN; ++n) {
        float values[4];
        o[m][n].get(values);
        FFPA_UNROLL
        for (int e = 0; e < 4; ++e) values[e] *= states[m].sum[e / 2];
        writer.put(n, values);
      }
    }
  };
  if (params.splits > 1) {
    write(std::true_type());
  } else {
    write(std::false_type());
  }
}

}  // namespace ffpa
