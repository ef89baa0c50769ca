// A small split-D attention forward for sm_80, written to be broken: it exercises copies, ring, swizzle, ldmatrix, mma,
// shuffles and barriers as a real kernel does, and `bug` (run time, uniform) removes or spoils one piece at a time.
//
// One block of 4 warps computes 64 query rows, 16 per warp. Keys come in tiles of 64; Q, K and V stream through a
// two-stage ring in slices of 16 columns of the head dim, so shared memory does not depend on the head dim.
#pragma once

#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "store_tile.cuh"
#include "tile/fragments.cuh"
#include "tile/smem_layout.cuh"
#include "tile/tile_copy.cuh"

namespace ffpa::testing {

enum class Bug : int {
  kNone,
  kNoSyncAfterWait,       // the slice is read before other threads' copies are known to have landed
  kNoSyncBeforeRefill,    // the stage is refilled while other warps may still read it
  kNoWait,                // no cp.async.wait_group
  kWaitTooShort,          // the wait leaves the current slice in flight
  kReaderSwizzleDiffers,  // K is read with another swizzle than it was written with
  kNoSwizzle,             // no swizzle on either side: correct, but full of bank conflicts
  kNoRowGuard,            // rows past the end of K and V are read
  kSmemOverrun,           // the ring's second stage lies past the end of shared memory
  kWrongShuffle,          // the row maximum is taken over the wrong lanes
  kBarrierInOneLane,      // one lane executes a __syncthreads that the others do not
  kMmaSkippedByOneLane,
  kMisalignedSource,       // global addresses are 2 bytes off
  kNoColumnMask,           // keys past the end take part, with score 0
  kUninitialisedScores,    // the score accumulators are not cleared
  kStagesOverlap,          // both stages of the ring are the same buffer
  kNoSyncWarpBeforeStore,  // the epilogue reads what other lanes write without __syncwarp
  kNoSyncWarpAfterStore,   // the epilogue overwrites what other lanes still read
  kStoreToInput,           // the output is written into Q
  kNoRowGuardOnStore,      // rows past the end of O are written
};

struct SplitDParams {
  const uint16_t* q;  // [batch·heads, nq, D]
  const uint16_t* k;  // [batch·heads, nk, D]
  const uint16_t* v;  // [batch·heads, nk, D]
  uint16_t* o;        // [batch·heads, nq, D]
  int nq;
  int nk;
  float scale_log2;  // softmax scale · log2(e)
  Bug bug;
};

inline constexpr int kTileRows = 64;
inline constexpr int kTileKeys = 64;
inline constexpr int kSliceColumns = 16;
inline constexpr int kSplitDThreads = 128;
inline constexpr int kWarpRows = 16;
inline constexpr uint32_t kSliceBytes = kTileRows * kSliceColumns * 2;  // bytes of a slice of Q, K or V
inline constexpr uint32_t kStageBytes = 2 * kSliceBytes;                // a Q and a K slice; or a V slice in K's place
inline constexpr uint32_t kSplitDSmemBytes = 2 * kStageBytes;

struct LayoutUnderTest {
  bool swizzled;
  FFPA_DEVICE uint32_t offset(int row, int chunk) const {
    constexpr tile::RowLayout kLayout(kSliceColumns * 2);
    return swizzled ? kLayout.offset(row, chunk) : uint32_t(row * kSliceColumns * 2 + chunk * 16);
  }
};

template <class Element, int kHeadDim>
FFPA_KERNEL(kSplitDThreads, 1)
void split_d_kernel(SplitDParams params) {
  constexpr int kSlices = kHeadDim / kSliceColumns;
  constexpr int kStepsPerTile = 2 * kSlices;  // K slices, then V slices
  const Bug bug = params.bug;
  const LayoutUnderTest layout{bug != Bug::kNoSwizzle};
  const int thread = ptx::thread_x();
  const int warp = thread / 32;
  const int lane = ptx::lane_id();
  const int first_row = ptx::block_x() * kTileRows;
  const int64_t head = ptx::block_y();
  const uint32_t smem = ptx::dynamic_smem();

  const tile::GmemWindow q{params.q + head * params.nq * kHeadDim, kHeadDim, params.nq, kHeadDim};
  const int readable_keys = bug == Bug::kNoRowGuard ? round_up(params.nk, kTileKeys) : params.nk;
  const tile::GmemWindow k{params.k + head * params.nk * kHeadDim, kHeadDim, readable_keys, kHeadDim};
  const tile::GmemWindow v{params.v + head * params.nk * kHeadDim, kHeadDim, readable_keys, kHeadDim};
  const int tiles = ceil_div(params.nk, kTileKeys);
  const int steps = tiles * kStepsPerTile;

  const auto stage_of = [&](int step) {
    if (bug == Bug::kStagesOverlap) return smem;
    return smem + step % 2 * kStageBytes * (bug == Bug::kSmemOverrun ? 2 : 1);
  };
  const auto copy_slice = [&](uint32_t slice_smem, tile::GmemWindow window) {
    if (bug == Bug::kMisalignedSource) ++window.origin;
    tile::copy_tile_async<kTileRows, kSliceColumns, kSplitDThreads>(slice_smem, layout, window, thread);
  };
  const auto issue_step = [&](int step) {
    const int tile_index = step / kStepsPerTile;
    const int slice = step % kStepsPerTile;
    const uint32_t stage = stage_of(step);
    if (slice < kSlices) {
      copy_slice(stage, tile::window_at(q, first_row, slice * kSliceColumns));
      copy_slice(stage + kSliceBytes, tile::window_at(k, tile_index * kTileKeys, slice * kSliceColumns));
    } else {
      copy_slice(stage + kSliceBytes, tile::window_at(v, tile_index * kTileKeys, (slice - kSlices) * kSliceColumns));
    }
  };

  float o[kHeadDim / 8][4] = {};  // C fragments: 16 rows × kHeadDim columns of the warp
  float row_max[2] = {-kInfinity, -kInfinity};
  float row_sum[2] = {0, 0};
  int step = 0;
  issue_step(0);
  ptx::cp_async_commit_group();

  // Starts the next step's copies and waits for this one's; returns its stage.
  const auto begin_step = [&] {
    if (step + 1 < steps) issue_step(step + 1);
    ptx::cp_async_commit_group();
    if (bug == Bug::kWaitTooShort) {
      ptx::cp_async_wait_group<2>();
    } else if (bug != Bug::kNoWait) {
      ptx::cp_async_wait_group<1>();
    }
    if (bug != Bug::kNoSyncAfterWait) ptx::sync_block();  // everybody's copies have landed
    return stage_of(step);
  };
  const auto end_step = [&] {
    if (bug != Bug::kNoSyncBeforeRefill) ptx::sync_block();  // everybody has read the stage: it may be refilled
    ++step;
  };

  for (int tile_index = 0; tile_index < tiles; ++tile_index) {
    float s[kTileKeys / 8][4];  // C fragments: 16 rows × 64 keys
    if (bug != Bug::kUninitialisedScores) {
      for (auto& fragment : s) {
        for (float& value : fragment) value = 0;
      }
    }

    // S += Q[:, slice] · K[:, slice]ᵀ
    for (int slice = 0; slice < kSlices; ++slice) {
      const uint32_t stage = begin_step();
      uint32_t a[4];
      const tile::Coordinate at_a = tile::ldmatrix_a(lane);
      ptx::ldmatrix_x4(a, stage + layout.offset(warp * kWarpRows + at_a.row, at_a.column));
      for (int pair = 0; pair < kTileKeys / 16; ++pair) {
        uint32_t b[4];
        const tile::Coordinate at_b = tile::ldmatrix_b_pair(lane);
        const int key = pair * 16 + at_b.row;
        const uint32_t wrong_bits = bug == Bug::kReaderSwizzleDiffers && key % 16 >= 8 ? 0x10 : 0;
        ptx::ldmatrix_x4(b, stage + kSliceBytes + (layout.offset(key, at_b.column) ^ wrong_bits));
        if (bug != Bug::kMmaSkippedByOneLane || pair != 3 || lane != 31) {
          ptx::mma_m16n8k16_f32<Element>(s[2 * pair], a, b[0], b[1]);
        }
        ptx::mma_m16n8k16_f32<Element>(s[2 * pair + 1], a, b[2], b[3]);
      }
      end_step();
    }

    // Computes the online softmax of rows g and g + 8 of the warp, in base 2.
    const int valid_keys = bug == Bug::kNoColumnMask ? kTileKeys : params.nk - tile_index * kTileKeys;
    for (int half = 0; half < 2; ++half) {
      float tile_max = -kInfinity;
      for (int n = 0; n < kTileKeys / 8; ++n) {
        for (int e = 0; e < 2; ++e) {
          float& score = s[n][2 * half + e];
          const int key = n * 8 + tile::c_coordinate(lane, e).column;
          score = key < valid_keys ? score * params.scale_log2 : -kInfinity;
          tile_max = max_of(tile_max, score);
        }
      }
      tile_max = max_of(tile_max, ptx::shfl_xor(tile_max, 1));
      tile_max = max_of(tile_max, ptx::shfl_xor(tile_max, bug == Bug::kWrongShuffle ? 4 : 2));
      const float new_max = max_of(row_max[half], tile_max);
      const float correction = ptx::ex2(row_max[half] - new_max);
      row_max[half] = new_max;
      float tile_sum = 0;
      for (int n = 0; n < kTileKeys / 8; ++n) {
        for (int e = 0; e < 2; ++e) {
          float& score = s[n][2 * half + e];
          score = ptx::ex2(score - new_max);
          tile_sum += score;
        }
      }
      tile_sum += ptx::shfl_xor(tile_sum, 1);
      tile_sum += ptx::shfl_xor(tile_sum, 2);
      row_sum[half] = row_sum[half] * correction + tile_sum;
      for (auto& fragment : o) {
        fragment[2 * half] *= correction;
        fragment[2 * half + 1] *= correction;
      }
    }

    // O[:, slice] += P · V[:, slice]
    for (int slice = 0; slice < kSlices; ++slice) {
      const uint32_t v_slice = begin_step() + kSliceBytes;
      for (int depth = 0; depth < kTileKeys / 16; ++depth) {
        uint32_t p[4], b[4];
        tile::pack_c_pair_as_a<Element>(p, s[2 * depth], s[2 * depth + 1]);
        const tile::Coordinate at_b = tile::ldmatrix_b_pair_trans(lane);
        ptx::ldmatrix_x4_trans(b, v_slice + layout.offset(depth * 16 + at_b.row, at_b.column));
        ptx::mma_m16n8k16_f32<Element>(o[2 * slice], p, b[0], b[1]);
        ptx::mma_m16n8k16_f32<Element>(o[2 * slice + 1], p, b[2], b[3]);
      }
      end_step();
    }
    if (bug == Bug::kBarrierInOneLane && warp == 1 && lane == 5) ptx::sync_block();
  }

  // Each warp turns 16 rows × 16 columns at a time in shared memory, to store 16 bytes per lane.
  const uint32_t turn_smem = smem + warp * (kWarpRows * kSliceColumns * 2);
  const float inverse[2] = {1 / row_sum[0], 1 / row_sum[1]};
  for (int slice = 0; slice < kSlices; ++slice) {
    if (bug != Bug::kNoSyncWarpAfterStore) ptx::sync_warp();  // the previous columns have been read
    for (int n = 0; n < 2; ++n) {
      for (int half = 0; half < 2; ++half) {
        const float* fragment = o[2 * slice + n];
        const tile::Coordinate at = tile::c_coordinate(lane, 2 * half);
        ptx::st_shared_4(
            turn_smem + layout.offset(at.row, n) + at.column * 2,
            ptx::pack<Element>(fragment[2 * half] * inverse[half], fragment[2 * half + 1] * inverse[half]));
      }
    }
    if (bug != Bug::kNoSyncWarpBeforeStore) ptx::sync_warp();
    const int row = first_row + warp * kWarpRows;
    uint16_t* target = bug == Bug::kStoreToInput ? const_cast<uint16_t*>(params.q) : params.o;
    const int rows = bug == Bug::kNoRowGuardOnStore ? kWarpRows : params.nq - row;
    tile::store_tile<kWarpRows, kSliceColumns, 32>(
        {target + (head * params.nq + row) * kHeadDim + slice * kSliceColumns, kHeadDim, rows, kSliceColumns},
        turn_smem, layout, lane);
  }
}

}  // namespace ffpa::testing
