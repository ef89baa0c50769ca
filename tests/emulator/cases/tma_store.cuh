// Cases for the TMA stores of ptx/native/tma.cuh, and for what has to be waited for and fenced around them.
#pragma once

#include "cases/case.h"
#include "cases/flags.cuh"
#include "ptx/instructions.cuh"

namespace ffpa::cases {

inline constexpr int kStoreSmemBytes = 8192;  // bytes: boxes at the start, a barrier in the last kilobyte
inline constexpr int kStoreBarrierOffset = 7168;

// One warp fills `words` words of shared memory and hands them to the async proxy.
FFPA_DEVICE void fill_source(uint32_t smem, const uint32_t* input, int words) {
  for (int word = ptx::lane_id(); word < words; word += 32) {
    ptx::st_shared_4(smem + word * 4, ptx::ld_global_4(input + word));
  }
  ptx::fence_proxy_async();
  ptx::sync_warp();
}

// Tensors of rank 2, 4 and 5, of loads and stores, start at `base` and have 21 rows of 40 elements, 48 apart; higher
// dimensions are groups of those rows.
inline TensorMapSpec tma_spec(const uint32_t* base, int rank, Swizzle swizzle) {
  constexpr uint64_t kRowBytes = 96;
  TensorMapSpec spec;
  spec.base = base;
  spec.rank = rank;
  spec.swizzle = swizzle;
  spec.size[0] = 40;
  spec.box[0] = swizzle == Swizzle::kNone ? 24 : swizzle_bytes(swizzle) / 2;
  if (rank == 2) {
    spec.size[1] = 21;
    spec.box[1] = 16;
    spec.stride_bytes[1] = kRowBytes;
  } else if (rank == 5) {
    const uint64_t sizes[] = {40, 2, 5, 1, 2}, rows[] = {0, 1, 2, 10, 10};
    for (int dim = 1; dim < 5; ++dim) {
      spec.size[dim] = sizes[dim];
      spec.box[dim] = 2;
      spec.stride_bytes[dim] = rows[dim] * kRowBytes;
    }
  } else {
    spec.size[1] = 7;
    spec.size[2] = 1;
    spec.size[3] = 2;
    spec.box[1] = 4;
    spec.box[2] = 2;
    spec.box[3] = 2;
    spec.stride_bytes[1] = kRowBytes;
    spec.stride_bytes[2] = 7 * kRowBytes;
    spec.stride_bytes[3] = 10 * kRowBytes;
  }
  return spec;
}

// Stores one box of words, as they lie, at `coordinates`. The store is complete when the grid ends.
template <int kRank>
FFPA_KERNEL(32, 1)
void tma_store_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, const uint32_t* input, int box_bytes, int c0, int c1,
                      int c2, int c3, int c4) {
  const uint32_t smem = ptx::dynamic_smem();
  fill_source(smem, input, box_bytes / 4);
  if (ptx::lane_id() != 0) return;
  if (kRank == 2) ptx::tma_store_2d(&map, smem, c0, c1);
  if (kRank == 4) ptx::tma_store_4d(&map, smem, c0, c1, c2, c3);
  if (kRank == 5) ptx::tma_store_5d(&map, smem, c0, c1, c2, c3, c4);
  ptx::bulk_commit_group();
  ptx::bulk_wait_group_read<0>();
}

template <int kRank, Swizzle kSwizzle, int kC0, int kC1, int kC2 = 0, int kC3 = 0, int kC4 = 0>
LaunchStatus run_tma_store(const uint32_t* input, uint32_t* output) {
  const TensorMapSpec spec = tma_spec(output, kRank, kSwizzle);
  ptx::TensorMap map;
  const LaunchStatus encoded = ptx::encode_tensor_map(map, spec);
  if (!encoded.ok()) return encoded;
  uint32_t bytes = 2;
  for (int i = 0; i < kRank; ++i) bytes *= spec.box[i];
  LaunchShape shape;
  shape.threads = 32;
  shape.smem_bytes = kStoreSmemBytes;
  return launch(shape, nullptr, tma_store_kernel<kRank>, map, input, int(bytes), kC0, kC1, kC2, kC3, kC4);
}

// Blocks add to the same floats one after the other, each a row of its own.
inline constexpr int kAddedFloats = 64, kAddingBlocks = 8;
template <int kBlocks>
FFPA_KERNEL(32, 1)
void add_in_turn_kernel(const uint32_t* input, uint32_t* output) {
  const uint32_t smem = ptx::dynamic_smem();
  uint32_t* const counters = output + kAddedFloats;  // numbers taken, and blocks that have added
  const uint32_t number = ptx::shfl_idx(ptx::lane_id() == 0 ? ptx::atom_add_global(counters, 1) : 0, 0);
  fill_source(smem, input + number * kAddedFloats, kAddedFloats);
  if (ptx::lane_id() != 0) return;
  ptx::wait_global_at_least(counters + 1, number);
  ptx::fence_proxy_async_global();
  ptx::bulk_reduce_add_f32(output, smem, kAddedFloats * 4);
  ptx::bulk_commit_group();
  ptx::bulk_wait_group<0>();
  ptx::red_add_release_global(counters + 1, 1);
}

inline LaunchStatus run_add_in_turn(const uint32_t* input, uint32_t* output) {
  LaunchShape shape;
  const LaunchStatus cleared = launch(shape, nullptr, clear_kernel<32>, output, kAddedFloats + 2);
  if (!cleared.ok()) return cleared;
  shape.grid.x = kAddingBlocks;
  shape.smem_bytes = kStoreSmemBytes;
  return launch(shape, nullptr, add_in_turn_kernel<kAddingBlocks>, input, output);
}

inline constexpr int kStoredRows = 8;  // rows of 64 elements: one atom of the 128-byte swizzle
inline constexpr int kStoredWords = kStoredRows * 32;

// Encodes a map of all rows of 64 elements that start at `base`, in boxes of 8 rows.
inline LaunchStatus encode_row_map(ptx::TensorMap& map, const uint32_t* base, int rows) {
  TensorMapSpec spec;
  spec.base = base;
  spec.rank = 2;
  spec.swizzle = Swizzle::k128Bytes;
  spec.size[0] = spec.box[0] = 64;
  spec.size[1] = rows;
  spec.box[1] = kStoredRows;
  spec.stride_bytes[1] = 128;
  return ptx::encode_tensor_map(map, spec);
}

// Two buffers take turns: one is filled while the other may still be read.
inline constexpr int kStoreRounds = 6;
FFPA_KERNEL(32, 1)
void store_ring_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, const uint32_t* input) {
  const uint32_t smem = ptx::dynamic_smem();
  const bool stores = ptx::lane_id() == 0;
  for (int round = 0; round < kStoreRounds; ++round) {
    if (stores) ptx::bulk_wait_group_read<1>();
    ptx::sync_warp();
    const uint32_t buffer = smem + round % 2 * kStoredWords * 4;
    fill_source(buffer, input + round * kStoredWords, kStoredWords);
    if (stores) {
      ptx::tma_store_2d<ptx::Evict::kSoon>(&map, buffer, 0, round * kStoredRows);
      ptx::bulk_commit_group();
    }
  }
  if (stores) ptx::bulk_wait_group<0>();
}

inline LaunchStatus run_store_ring(const uint32_t* input, uint32_t* output) {
  ptx::TensorMap map;
  const LaunchStatus encoded = encode_row_map(map, output, kStoreRounds * kStoredRows);
  if (!encoded.ok()) return encoded;
  LaunchShape shape;
  shape.smem_bytes = kStoreSmemBytes;
  return launch(shape, nullptr, store_ring_kernel, map, input);
}

// A block uses its tensor as a workspace. Warp 0 stores box after box; as soon as the older of two groups is complete,
// warp 1 reads it back: by TMA in even rounds, by ordinary loads in odd ones. `output` is workspace, then results.
inline constexpr int kWorkspaceRounds = 4;
FFPA_KERNEL(64, 1)
void workspace_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  const bool stores = ptx::thread_x() < 32;
  const uint32_t smem = ptx::dynamic_smem();
  const uint32_t read_back = smem + kWorkspaceRounds * kStoredWords * 4;
  const uint32_t barrier = smem + kStoreBarrierOffset;
  uint32_t* results = output + kWorkspaceRounds * kStoredWords;
  if (ptx::thread_x() == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
  }
  for (int round = 0; round <= kWorkspaceRounds; ++round) {
    if (stores && round < kWorkspaceRounds) {
      const uint32_t source = smem + round * kStoredWords * 4;
      fill_source(source, input + round * kStoredWords, kStoredWords);
      if (lane == 0) {
        ptx::tma_store_2d<ptx::Evict::kSoon>(&map, source, 0, round * kStoredRows);
        ptx::bulk_commit_group();
        ptx::bulk_wait_group<1>();
        ptx::fence_proxy_async_global();
      }
    } else if (stores && lane == 0) {
      ptx::bulk_wait_group<0>();
      ptx::fence_proxy_async_global();
    }
    ptx::sync_block();
    if (stores || round == 0) continue;
    const int previous = round - 1;
    for (int word = lane; word < kStoredWords && previous % 2; word += 32) {
      const int at = previous * kStoredWords + word;
      ptx::st_global_4(results + at, ptx::ld_global_4(output + at));
    }
    if (previous % 2) continue;
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(barrier, kStoredWords * 4);
      ptx::tma_load_2d<ptx::Evict::kSoon>(read_back, &map, barrier, 0, previous * kStoredRows);
    }
    ptx::mbarrier_wait(barrier, previous / 2 % 2);
    for (int word = lane; word < kStoredWords; word += 32) {
      ptx::st_global_4(results + previous * kStoredWords + word, ptx::ld_shared_4(read_back + word * 4));
    }
    ptx::sync_warp();
  }
}

inline LaunchStatus run_workspace(const uint32_t* input, uint32_t* output) {
  ptx::TensorMap map;
  const LaunchStatus encoded = encode_row_map(map, output, kWorkspaceRounds * kStoredRows);
  if (!encoded.ok()) return encoded;
  LaunchShape shape;
  shape.threads = 64;
  shape.smem_bytes = kStoreSmemBytes;
  return launch(shape, nullptr, workspace_kernel, map, input, output);
}

inline std::vector<Case> tma_store_cases() {
  constexpr int kSm90 = 90;
  constexpr int kTensorWords = 21 * 24;
  const auto store_case = [](const char* name, int words, LaunchStatus (*run)(const uint32_t*, uint32_t*)) {
    return Case{name, kSm90, Input::kBits, words, kTensorWords, 0, run};
  };
  return {
      store_case("tma_store_2d/inside", 24 * 16 / 2, run_tma_store<2, Swizzle::kNone, 8, 2>),
      store_case("tma_store_2d/outside", 24 * 16 / 2, run_tma_store<2, Swizzle::kNone, 24, 10>),
      store_case("tma_store_2d/other_columns", 24 * 16 / 2, run_tma_store<2, Swizzle::kNone, 16, 7>),
      store_case("tma_store_2d/nothing", 24 * 16 / 2, run_tma_store<2, Swizzle::kNone, 8, 21>),
      store_case("tma_store_2d/swizzle_32", 16 * 16 / 2, run_tma_store<2, Swizzle::k32Bytes, 8, 2>),
      store_case("tma_store_2d/swizzle_64", 32 * 16 / 2, run_tma_store<2, Swizzle::k64Bytes, 16, 9>),
      store_case("tma_store_2d/swizzle_128", 64 * 16 / 2, run_tma_store<2, Swizzle::k128Bytes, 8, 7>),
      store_case("tma_store_4d/inside", 24 * 16 / 2, run_tma_store<4, Swizzle::kNone, 8, 2, 0, 0>),
      store_case("tma_store_4d/outside", 64 * 16 / 2, run_tma_store<4, Swizzle::k128Bytes, 8, 5, 0, 1>),
      store_case("tma_store_5d/inside", 24 * 16 / 2, run_tma_store<5, Swizzle::kNone, 8, 0, 2, 0, 0>),
      store_case("tma_store_5d/outside", 64 * 16 / 2, run_tma_store<5, Swizzle::k128Bytes, 8, 1, 4, 0, 1>),
      {"bulk_reduce_add_f32", kSm90, Input::kFloats, kAddingBlocks * kAddedFloats, kAddedFloats + 2, 0,
       run_add_in_turn},
      {"bulk_wait_group_read", kSm90, Input::kBits, kStoreRounds * kStoredWords, kStoreRounds * kStoredWords, 0,
       run_store_ring},
      {"fence_proxy_async_global", kSm90, Input::kBits, kWorkspaceRounds * kStoredWords,
       2 * kWorkspaceRounds * kStoredWords, 0, run_workspace},
  };
}

}  // namespace ffpa::cases
