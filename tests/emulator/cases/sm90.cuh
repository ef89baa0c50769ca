// Cases for instructions that sm_90a has and sm_80 does not: stmatrix, pack4, TMA loads, clusters, setmaxnreg.
#pragma once

#include "cases/arithmetic.cuh"
#include "cases/case.h"
#include "cases/copy_to_block.cuh"
#include "cases/matrix.cuh"
#include "cases/tma_store.cuh"
#include "cases/wgmma.cuh"
#include "ptx/instructions.cuh"

namespace ffpa::cases {

inline constexpr int kSm90 = 90;

// Stores registers as rows of 16 bytes.
FFPA_KERNEL(32, 1) void stmatrix_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  const uint32_t row = ptx::dynamic_smem() + lane * kRowPitchBytes;
  uint32_t value[4];
  ptx::ld_global_16(value, input + lane * 4);
  ptx::stmatrix_x4(row, value);
  ptx::sync_warp();
  ptx::ld_shared_16(value, row);
  ptx::st_global_16(output + lane * 4, value);
}

inline std::vector<Case> stmatrix_cases() {
  return {warp_case<stmatrix_kernel, 32 * kRowPitchBytes>("stmatrix_x4", Input::kBits, 4, 4, kSm90)};
}

template <class Element>
FFPA_KERNEL(32, 1)
void pack4_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  for (int i = 0; i < kValues; ++i) {
    float values[4];
    for (int e = 0; e < 4; ++e) values[e] = float_from_bits(ptx::ld_global_4(input + (i * 32 + lane) * 4 + e));
    ptx::st_global_4(output + i * 32 + lane, ptx::pack4<Element>(values[0], values[1], values[2], values[3]));
  }
}

inline std::vector<Case> pack4_cases() {
  return {
      warp_case<pack4_kernel<E4M3>>("pack4/e4m3", Input::kFloats, 4 * kValues, kValues, kSm90),
      warp_case<pack4_kernel<E4M3>>("pack4/e4m3_any_magnitude", Input::kBits, 4 * kValues, kValues, kSm90),
      warp_case<pack4_kernel<E5M2>>("pack4/e5m2", Input::kPositiveFloats, 4 * kValues, kValues, kSm90),
      warp_case<pack4_kernel<E5M2>>("pack4/e5m2_any_magnitude", Input::kBits, 4 * kValues, kValues, kSm90),
  };
}

// One lane of the warp is elected; which one is not defined.
FFPA_KERNEL(32, 1) void elect_one_kernel(const uint32_t*, uint32_t* output) {
  const bool elected = ptx::elect_one();
  const uint32_t votes = ptx::vote_ballot(elected);
  ptx::st_global_4(output + ptx::lane_id(), votes != 0 && (votes & (votes - 1)) == 0);
}

// Two warpgroups trade registers; the result shows only that they go on.
FFPA_KERNEL(256, 1) void register_budget_kernel(const uint32_t* input, uint32_t* output) {
  const int thread = ptx::thread_x();
  uint32_t value = 0;
  if (thread < 128) {
    ptx::decrease_registers<40>();
    value = ptx::ld_global_4(input + thread) + 1;
  } else {
    ptx::increase_registers<232>();
    value = ptx::ld_global_4(input + thread) + 2;
  }
  ptx::st_global_4(output + thread, value);
}

inline constexpr int kTmaSmemBytes = 8192;  // bytes: the box at the start, the barrier in the last kilobyte
inline constexpr int kTmaBarrierOffset = 7168;

// Loads one box at `coordinates` and writes out the shared memory it fills, as it lies.
template <int kRank>
FFPA_KERNEL(32, 1)
void tma_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t* output, int box_bytes, int c0, int c1, int c2,
                int c3, int c4) {
  const int lane = ptx::lane_id();
  const uint32_t smem = ptx::dynamic_smem();
  const uint32_t barrier = smem + kTmaBarrierOffset;
  if (lane == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(barrier, box_bytes);
    if (kRank == 2) ptx::tma_load_2d(smem, &map, barrier, c0, c1);
    if (kRank == 4) ptx::tma_load_4d(smem, &map, barrier, c0, c1, c2, c3);
    if (kRank == 5) ptx::tma_load_5d(smem, &map, barrier, c0, c1, c2, c3, c4);
  }
  ptx::sync_warp();
  ptx::mbarrier_wait(barrier, 0);
  for (int word = lane; word < box_bytes / 4; word += 32) {
    ptx::st_global_4(output + word, ptx::ld_shared_4(smem + word * 4));
  }
}

template <int kRank, Swizzle kSwizzle, int kC0, int kC1, int kC2 = 0, int kC3 = 0, int kC4 = 0>
LaunchStatus run_tma(const uint32_t* input, uint32_t* output) {
  const TensorMapSpec spec = tma_spec(input, kRank, kSwizzle);
  ptx::TensorMap map;
  const LaunchStatus encoded = ptx::encode_tensor_map(map, spec);
  if (!encoded.ok()) return encoded;
  uint32_t bytes = 2;
  for (int i = 0; i < kRank; ++i) bytes *= spec.box[i];
  LaunchShape shape;
  shape.threads = 32;
  shape.smem_bytes = kTmaSmemBytes;
  return launch(shape, nullptr, tma_kernel<kRank>, map, output, int(bytes), kC0, kC1, kC2, kC3, kC4);
}

// A cluster has two blocks. Each block loads half of a box and multicasts it to both; each tells both when it has read
// its copy, and overwrites nothing before both have.
FFPA_KERNEL(32, 1) void multicast_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t* output) {
  constexpr uint32_t kBlocks = 2;
  constexpr uint32_t kHalfBytes = 512;  // 4 rows of 64 elements
  const int lane = ptx::lane_id();
  const uint32_t rank = ptx::cluster_rank();
  const uint32_t smem = ptx::dynamic_smem();
  const uint32_t full = smem + kTmaBarrierOffset;
  const uint32_t empty = full + 8;
  if (lane == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init(empty, kBlocks);
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  for (int round = 0; round < 2; ++round) {
    if (lane == 0) {
      ptx::mbarrier_wait(empty, (round & 1) ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, kBlocks * kHalfBytes);
      const int row = round * 8 + int(rank) * 4;
      const uint32_t half = smem + rank * kHalfBytes;
      ptx::tma_load_4d_multicast(half, &map, full, 0, row, 0, 0, 3);
    }
    ptx::mbarrier_wait(full, round & 1);
    uint32_t* target = output + (round * kBlocks + rank) * (2 * kHalfBytes / 4);
    for (uint32_t word = lane; word < 2 * kHalfBytes / 4; word += 32) {
      ptx::st_global_4(target + word, ptx::ld_shared_4(smem + word * 4));
    }
    ptx::sync_warp();
    if (lane < int(kBlocks)) ptx::mbarrier_arrive_remote(empty, lane);
  }
  // Nobody leaves while its shared memory is still a target.
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

inline LaunchStatus run_multicast(const uint32_t* input, uint32_t* output) {
  TensorMapSpec spec;
  spec.base = input;
  spec.rank = 4;
  spec.swizzle = Swizzle::k128Bytes;
  const uint64_t sizes[4] = {64, 16, 1, 1};
  const uint32_t boxes[4] = {64, 4, 1, 1};
  for (int i = 0; i < spec.rank; ++i) {
    spec.size[i] = sizes[i];
    spec.box[i] = boxes[i];
    spec.stride_bytes[i] = i == 1 ? 128 : 2048;
  }
  ptx::TensorMap map;
  const LaunchStatus encoded = ptx::encode_tensor_map(map, spec);
  if (!encoded.ok()) return encoded;
  LaunchShape shape;
  shape.grid = {2, 1, 1};
  shape.cluster = {2, 1, 1};
  shape.threads = 32;
  shape.smem_bytes = kTmaSmemBytes;
  return launch(shape, nullptr, multicast_kernel, map, output);
}

inline std::vector<Case> async_cases() {
  constexpr int kTmaIn = 21 * 24;  // words
  const auto tma_case = [](const char* name, int words, LaunchStatus (*run)(const uint32_t*, uint32_t*)) {
    return Case{name, kSm90, Input::kBits, kTmaIn, words, 0, run};
  };
  return {
      {"elect_one", kSm90, Input::kBits, 1, 32, 0, run_kernel<elect_one_kernel, 32, 0>},
      {"increase_registers", kSm90, Input::kBits, 256, 256, 0, run_kernel<register_budget_kernel, 256, 0>},
      tma_case("tma_load_2d/inside", 24 * 16 / 2, run_tma<2, Swizzle::kNone, 8, 2>),
      tma_case("tma_load_2d/outside", 24 * 16 / 2, run_tma<2, Swizzle::kNone, 24, -3>),
      tma_case("tma_load_2d/swizzle_32", 16 * 16 / 2, run_tma<2, Swizzle::k32Bytes, 8, 2>),
      tma_case("tma_load_2d/swizzle_64", 32 * 16 / 2, run_tma<2, Swizzle::k64Bytes, 16, 9>),
      tma_case("tma_load_2d/swizzle_128", 64 * 16 / 2, run_tma<2, Swizzle::k128Bytes, -8, 1>),
      tma_case("tma_load_4d/inside", 24 * 16 / 2, run_tma<4, Swizzle::kNone, 8, 2, 0, 0>),
      tma_case("tma_load_4d/outside", 64 * 16 / 2, run_tma<4, Swizzle::k128Bytes, -8, 5, -1, 1>),
      tma_case("tma_load_5d/inside", 24 * 16 / 2, run_tma<5, Swizzle::kNone, 8, 0, 2, 0, 0>),
      tma_case("tma_load_5d/outside", 64 * 16 / 2, run_tma<5, Swizzle::k128Bytes, -8, 1, -1, 0, 1>),
      {"tma_load_4d_multicast", kSm90, Input::kBits, 512, 1024, 0, run_multicast},
      {"copy_to_block", kSm90, Input::kBits, 512, 512, 0, run_copy_to_block<CopyBug::kNone>},
  };
}

inline std::vector<Case> sm90_cases() {
  std::vector<Case> all;
  for (auto group : {stmatrix_cases, pack4_cases, async_cases, tma_store_cases, wgmma_cases}) {
    const std::vector<Case> cases = group();
    all.insert(all.end(), cases.begin(), cases.end());
  }
  return all;
}

}  // namespace ffpa::cases
