// The sm_90a counterpart of split_d_kernel.cuh: TMA, mbarriers, wgmma, setmaxnreg, clusters with multicast. `kBug`
// spoils one piece; it is a template argument because a branch among asynchronous products makes ptxas serialise them.
//
// Warps 0 … 3 compute 64 query rows, warp 4 issues the copies. Keys come in tiles of 64; Q, K and V stream through a
// ring of stages in slices of 64 columns (one 128-byte swizzle atom wide). In a cluster each block loads its share of
// every K and V slice for all blocks.
#pragma once

#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "tile/fragments.cuh"

namespace ffpa::testing {

enum class Sm90Bug : int {
  kNone,
  kNoProductWait,       // scores are used without wgmma.wait_group
  kNoFullWait,          // products do not wait for the copies
  kNoEmptyWait,         // copies do not wait for the products
  kReleasedBeforeWait,  // the stage is released while products still read it
  kExpectTooFewBytes,
  kExpectTooManyBytes,
  kNoProductFence,  // no wgmma.fence after the scores were touched
  kWrongDescriptorStride,
  kMisalignedDescriptor,  // a tile address in the middle of a swizzle atom
  kNoSyncAfterBarrierInit,
  kWrongEmptyParity,
  kWrongOperandMajor,  // V is read as if it were stored by columns
  kOneWarpReleases,    // the other warps' arrivals on the empty barrier are missing
  kOnlyLocalRelease,   // other blocks of the cluster are not told of a release
  kProductSkippedByOneWarp,
  kAccumulatorsTouchedInFlight,
  kMisalignedDestination,  // TMA destinations that are not 128-byte aligned
};

struct SplitDSm90Params {
  uint16_t* o;  // [batch·heads, nq, D]
  int nq;
  int nk;
  float scale_log2;
};

inline constexpr int kSm90Threads = 256;
inline constexpr int kConsumerWarps = 4;
inline constexpr int kSm90SliceColumns = 64;
inline constexpr uint32_t kSm90SliceBytes = 64 * kSm90SliceColumns * 2;
inline constexpr uint32_t kSm90StageBytes = 2 * kSm90SliceBytes;  // bytes: Q and K; or V in K's place
inline constexpr uint32_t kAtomBytes = 1024;                      // 8 rows of 128 bytes

template <int kStages>
inline constexpr uint32_t kSplitDSm90SmemBytes = kStages * (kSm90StageBytes + 16);

// Tensor maps are [batch·heads, n, D] with boxes of 64 columns; K's and V's have 64 / kCluster rows.
template <int kHeadDim, int kStages, int kCluster, Sm90Bug kBug>
FFPA_KERNEL(kSm90Threads, 1)
void split_d_sm90_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap q_map, const FFPA_GRID_CONSTANT ptx::TensorMap k_map,
                         const FFPA_GRID_CONSTANT ptx::TensorMap v_map, SplitDSm90Params params) {
  constexpr int kSlices = kHeadDim / kSm90SliceColumns;
  constexpr int kStepsPerTile = 2 * kSlices;
  const int thread = ptx::thread_x();
  const int warp = thread / 32;
  const int lane = ptx::lane_id();
  const int head = ptx::block_y();
  const int first_row = ptx::block_x() * 64;
  const uint32_t smem = ptx::dynamic_smem() + (kBug == Sm90Bug::kMisalignedDestination ? 16 : 0);
  const uint32_t full = ptx::dynamic_smem() + kStages * kSm90StageBytes;  // [kStages] mbarriers
  const uint32_t empty = full + kStages * 8;                              // [kStages]
  const int tiles = ceil_div(params.nk, 64);
  const int steps = tiles * kStepsPerTile;

  if (thread == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(full + i * 8, 1);
      ptx::mbarrier_init(empty + i * 8, kConsumerWarps * kCluster);
    }
    ptx::fence_mbarrier_init();
  }
  if (kCluster > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else if (kBug != Sm90Bug::kNoSyncAfterBarrierInit) {
    ptx::sync_block();
  }
  const uint32_t rank = kCluster > 1 ? ptx::cluster_rank() : 0;

  if (warp >= kConsumerWarps) {
    ptx::decrease_registers<40>();
    if (warp == kConsumerWarps && ptx::elect_one()) {
      for (int step = 0; step < steps; ++step) {
        const int stage = step % kStages;
        const int tile_index = step / kStepsPerTile;
        const int slice = step % kStepsPerTile;
        const bool is_k = slice < kSlices;
        const uint32_t base = smem + stage * kSm90StageBytes;
        const uint32_t full_stage = full + stage * 8;
        constexpr uint32_t kParityError = kBug == Sm90Bug::kWrongEmptyParity ? 1 : 0;
        if (kBug != Sm90Bug::kNoEmptyWait) {
          ptx::mbarrier_wait(empty + stage * 8, ((step / kStages & 1) ^ 1) ^ kParityError);
        }
        uint32_t bytes = is_k ? kSm90StageBytes : kSm90SliceBytes;
        if (kBug == Sm90Bug::kExpectTooManyBytes) bytes += 16;
        if (kBug == Sm90Bug::kExpectTooFewBytes && is_k) bytes -= kSm90SliceBytes;
        ptx::mbarrier_arrive_expect_tx(full_stage, bytes);
        if (is_k) ptx::tma_load_4d(base, &q_map, full_stage, slice * kSm90SliceColumns, first_row, head, 0);
        const ptx::TensorMap* map = is_k ? &k_map : &v_map;
        const int column = (is_k ? slice : slice - kSlices) * kSm90SliceColumns;
        const uint32_t target = base + kSm90SliceBytes;
        if (kCluster == 1) {
          ptx::tma_load_4d(target, map, full_stage, column, tile_index * 64, head, 0);
        } else {
          constexpr int kShareRows = 64 / kCluster;
          ptx::tma_load_4d_multicast(target + rank * (kSm90SliceBytes / kCluster), map, full_stage, column,
                                     tile_index * 64 + int(rank) * kShareRows, head, 0, (1 << kCluster) - 1);
        }
      }
    }
  } else {
    ptx::increase_registers<232>();
    float o[kSlices][32] = {};  // wgmma accumulators of 64 rows × 64 columns, per slice of the head dim
    float row_max[2] = {-kInfinity, -kInfinity};
    float row_sum[2] = {0, 0};
    int step = 0;
    const auto release = [&](int stage) {
      ptx::sync_warp();
      if (kCluster == 1 || kBug == Sm90Bug::kOnlyLocalRelease) {
        const bool silent = kBug == Sm90Bug::kOneWarpReleases && warp > 0;
        if (lane == 0 && !silent) ptx::mbarrier_arrive(empty + stage * 8);
      } else if (lane < kCluster) {
        ptx::mbarrier_arrive_remote(empty + stage * 8, lane);
      }
    };
    for (int tile_index = 0; tile_index < tiles; ++tile_index) {
      float s[32];  // 64 rows × 64 keys
      FFPA_NO_UNROLL
      for (int slice = 0; slice < kSlices; ++slice, ++step) {
        const int stage = step % kStages;
        const uint32_t q_smem = smem + stage * kSm90StageBytes + (kBug == Sm90Bug::kMisalignedDescriptor ? 128 : 0);
        const uint32_t k_smem = q_smem + kSm90SliceBytes;
        constexpr uint32_t kKeyStride = kBug == Sm90Bug::kWrongDescriptorStride ? kAtomBytes / 2 : kAtomBytes;
        if (kBug != Sm90Bug::kNoFullWait) ptx::mbarrier_wait(full + stage * 8, step / kStages & 1);
        if (kBug != Sm90Bug::kNoProductFence) ptx::wgmma_fence();
        FFPA_UNROLL
        for (int k16 = 0; k16 < 4; ++k16) {
          if (kBug == Sm90Bug::kProductSkippedByOneWarp && warp == 2 && k16 == 3) continue;
          ptx::wgmma_ss<Half, 64>(s, ptx::wgmma_descriptor(q_smem + k16 * 32, 16, kAtomBytes, Swizzle::k128Bytes),
                                  ptx::wgmma_descriptor(k_smem + k16 * 32, 16, kKeyStride, Swizzle::k128Bytes),
                                  slice > 0 || k16 > 0);
        }
        ptx::wgmma_commit_group();
        if (kBug == Sm90Bug::kAccumulatorsTouchedInFlight) s[0] = 0;
        if (kBug == Sm90Bug::kReleasedBeforeWait) release(stage);
        if (kBug != Sm90Bug::kNoProductWait) ptx::wgmma_wait_group<0>();
        if (kBug != Sm90Bug::kReleasedBeforeWait) release(stage);
      }

      float correction[2];
      uint32_t p[4][4];
      FFPA_UNROLL
      for (int half = 0; half < 2; ++half) {
        float tile_max = -kInfinity;
        FFPA_UNROLL
        for (int i = 0; i < 16; ++i) {
          float& score = s[i / 2 * 4 + half * 2 + i % 2];
          const int key = tile_index * 64 + i / 2 * 8 + lane % 4 * 2 + i % 2;
          score = key < params.nk ? score * params.scale_log2 : -kInfinity;
          tile_max = max_of(tile_max, score);
        }
        tile_max = max_of(tile_max, ptx::shfl_xor(tile_max, 1));
        tile_max = max_of(tile_max, ptx::shfl_xor(tile_max, 2));
        const float new_max = max_of(row_max[half], tile_max);
        correction[half] = ptx::ex2(row_max[half] - new_max);
        row_max[half] = new_max;
        float tile_sum = 0;
        FFPA_UNROLL
        for (int i = 0; i < 16; ++i) {
          float& score = s[i / 2 * 4 + half * 2 + i % 2];
          score = ptx::ex2(score - new_max);
          tile_sum += score;
        }
        tile_sum += ptx::shfl_xor(tile_sum, 1);
        tile_sum += ptx::shfl_xor(tile_sum, 2);
        row_sum[half] = row_sum[half] * correction[half] + tile_sum;
      }
      FFPA_UNROLL
      for (int k16 = 0; k16 < 4; ++k16) {
        FFPA_UNROLL
        for (int r = 0; r < 4; ++r) {
          const int first = (2 * k16 + r / 2) * 4 + r % 2 * 2;
          p[k16][r] = ptx::pack<Half>(s[first], s[first + 1]);
        }
      }
      FFPA_UNROLL
      for (int slice = 0; slice < kSlices; ++slice) {
        FFPA_UNROLL
        for (int i = 0; i < 32; ++i) o[slice][i] *= correction[i / 2 % 2];
      }

      FFPA_UNROLL
      for (int slice = 0; slice < kSlices; ++slice, ++step) {
        constexpr auto kMajorV = kBug == Sm90Bug::kWrongOperandMajor ? ptx::OperandMajor::kK : ptx::OperandMajor::kMN;
        const int stage = step % kStages;
        const uint32_t v_smem = smem + stage * kSm90StageBytes + kSm90SliceBytes;
        if (kBug != Sm90Bug::kNoFullWait) ptx::mbarrier_wait(full + stage * 8, step / kStages & 1);
        ptx::wgmma_fence();
        FFPA_UNROLL
        for (int k16 = 0; k16 < 4; ++k16) {
          ptx::wgmma_rs<Half, 64, kMajorV>(
              o[slice], p[k16],
              ptx::wgmma_descriptor(v_smem + k16 * 2 * kAtomBytes, 8 * kAtomBytes, kAtomBytes, Swizzle::k128Bytes),
              true);
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();
        release(stage);
      }
    }
    FFPA_UNROLL
    for (int slice = 0; slice < kSlices; ++slice) {
      FFPA_UNROLL
      for (int i = 0; i < 32; i += 2) {
        const int half = i / 2 % 2;
        const int row = first_row + warp * 16 + lane / 4 + half * 8;
        const int column = slice * kSm90SliceColumns + i / 4 * 8 + lane % 4 * 2;
        const float inverse = 1 / row_sum[half];
        if (row >= params.nq) continue;
        ptx::st_global_4(params.o + (int64_t(head) * params.nq + row) * kHeadDim + column,
                         ptx::pack<Half>(o[slice][i] * inverse, o[slice][i + 1] * inverse));
      }
    }
  }
  if (kCluster > 1) {  // no block exits while another still signals its barriers
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

}  // namespace ffpa::testing
