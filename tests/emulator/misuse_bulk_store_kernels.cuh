// Kernels that misuse TMA stores, each in one way. The map has rows of 64 elements, 128 bytes, and boxes of one row.
#pragma once

#include "ptx/instructions.cuh"

namespace ffpa::testing {

inline constexpr uint32_t kStoredRowBytes = 128;
inline constexpr uint32_t kReadBackOffset = 4096;
inline constexpr uint32_t kLoadBarrierOffset = 8192;
inline constexpr int kFlagWord = 1000;  // of the output

// One warp writes ones to the row at `smem`.
FFPA_DEVICE void write_row(uint32_t smem, bool fence = true) {
  ptx::st_shared_4(smem + ptx::lane_id() * 4, 0x3c003c00);
  if (fence) ptx::fence_proxy_async();
  ptx::sync_warp();
}

FFPA_DEVICE void store_row(const ptx::TensorMap* map, uint32_t smem, int row = 0, int column = 0) {
  ptx::tma_store_2d(map, smem, column, row);
  ptx::bulk_commit_group();
}

// One thread loads a row and waits for it, on a barrier that it initialises here.
FFPA_DEVICE void load_row(const ptx::TensorMap* map, uint32_t smem, int row = 0) {
  const uint32_t barrier = ptx::dynamic_smem() + kLoadBarrierOffset;
  ptx::mbarrier_init(barrier, 1);
  ptx::mbarrier_arrive_expect_tx(barrier, kStoredRowBytes);
  ptx::tma_load_2d(smem, map, barrier, 0, row);
  ptx::mbarrier_wait(barrier, 0);
}

FFPA_KERNEL(32, 1) void store_never_awaited_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  write_row(ptx::dynamic_smem());
  if (ptx::lane_id() == 0) store_row(&map, ptx::dynamic_smem());
}

FFPA_KERNEL(32, 1) void store_to_an_odd_column_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  write_row(ptx::dynamic_smem());
  if (ptx::lane_id() != 0) return;
  store_row(&map, ptx::dynamic_smem(), 0, 3);
  ptx::bulk_wait_group<0>();
}

// The store begins before the tensor, which only loads may do (they find zeros there).
FFPA_KERNEL(32, 1) void store_before_the_tensor_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  write_row(ptx::dynamic_smem());
  if (ptx::lane_id() != 0) return;
  store_row(&map, ptx::dynamic_smem(), -1);
  ptx::bulk_wait_group<0>();
}

// The wait covers the groups that there are, and the store is in none.
FFPA_KERNEL(32, 1) void store_never_committed_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  write_row(ptx::dynamic_smem());
  if (ptx::lane_id() != 0) return;
  ptx::tma_store_2d(&map, ptx::dynamic_smem(), 0, 0);
  ptx::bulk_wait_group<0>();
}

// Another lane waits: groups belong to a thread.
FFPA_KERNEL(32, 1) void store_awaited_by_another_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  write_row(ptx::dynamic_smem());
  if (ptx::lane_id() == 0) store_row(&map, ptx::dynamic_smem());
  ptx::sync_warp();
  if (ptx::lane_id() == 1) ptx::bulk_wait_group<0>();
}

FFPA_KERNEL(32, 1) void store_without_proxy_fence_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  write_row(ptx::dynamic_smem(), false);
  if (ptx::lane_id() != 0) return;
  store_row(&map, ptx::dynamic_smem());
  ptx::bulk_wait_group_read<0>();
}

// The fence for global memory says nothing about the source.
FFPA_KERNEL(32, 1) void store_with_the_wrong_fence_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  write_row(ptx::dynamic_smem(), false);
  ptx::fence_proxy_async_global();
  ptx::sync_warp();
  if (ptx::lane_id() != 0) return;
  store_row(&map, ptx::dynamic_smem());
  ptx::bulk_wait_group_read<0>();
}

FFPA_KERNEL(32, 1) void store_without_barrier_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  ptx::st_shared_4(ptx::dynamic_smem() + ptx::lane_id() * 4, 0x3c003c00);
  ptx::fence_proxy_async();
  if (ptx::vote_ballot(true) == 0 || ptx::lane_id() != 0) return;  // a vote orders nothing
  store_row(&map, ptx::dynamic_smem());
  ptx::bulk_wait_group_read<0>();
}

// With kWait the storing lane waits, but no other lane waits for that lane.
template <bool kWait>
FFPA_KERNEL(32, 1)
void source_overwritten_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  const uint32_t smem = ptx::dynamic_smem();
  write_row(smem);
  if (ptx::lane_id() == 0) {
    store_row(&map, smem);
    if (kWait) ptx::bulk_wait_group_read<0>();
  }
  if (!kWait) ptx::sync_warp();
  if (ptx::vote_ballot(true) == 0) return;
  ptx::st_shared_4(smem + ptx::lane_id() * 4, 0x40004000);
  ptx::sync_warp();
  if (ptx::lane_id() == 0) ptx::bulk_wait_group<0>();
}

// Warp 1 overwrites what warp 0 has stored, after a barrier that comes before the wait.
FFPA_KERNEL(64, 1) void source_overwritten_by_a_warp_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  const uint32_t smem = ptx::dynamic_smem();
  const bool first = ptx::thread_x() < 32;
  if (first) write_row(smem);
  if (ptx::thread_x() == 0) store_row(&map, smem);
  ptx::sync_block();
  if (ptx::thread_x() == 0) ptx::bulk_wait_group_read<0>();
  if (!first) ptx::st_shared_4(smem + ptx::lane_id() * 4, 0x40004000);
}

// The wait leaves the younger of two groups pending, and then its source is overwritten.
FFPA_KERNEL(32, 1) void younger_source_overwritten_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  const uint32_t smem = ptx::dynamic_smem();
  write_row(smem);
  write_row(smem + kStoredRowBytes);
  if (ptx::lane_id() != 0) return;
  store_row(&map, smem, 0);
  store_row(&map, smem + kStoredRowBytes, 1);
  ptx::bulk_wait_group_read<1>();
  ptx::st_shared_4(smem + kStoredRowBytes, 0);
  ptx::bulk_wait_group_read<0>();
}

FFPA_KERNEL(32, 1) void source_overwritten_by_a_load_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  const uint32_t smem = ptx::dynamic_smem();
  write_row(smem);
  if (ptx::lane_id() != 0) return;
  store_row(&map, smem, 0);
  load_row(&map, smem, 1);
  ptx::bulk_wait_group_read<0>();
}

// The wait covers the reads of the store, which says nothing about its writes.
template <bool kTma>
FFPA_KERNEL(32, 1)
void read_before_complete_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t* output) {
  const uint32_t smem = ptx::dynamic_smem();
  write_row(smem);
  if (ptx::lane_id() != 0) return;
  store_row(&map, smem);
  ptx::bulk_wait_group_read<0>();
  ptx::fence_proxy_async_global();
  if (kTma) {
    load_row(&map, smem + kReadBackOffset);
    ptx::st_global_4(output + 512, ptx::ld_shared_4(smem + kReadBackOffset));
  } else {
    ptx::st_global_4(output + 512, ptx::ld_global_4(output));
  }
}

FFPA_KERNEL(32, 1)
void ordinary_store_before_complete_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t* output) {
  write_row(ptx::dynamic_smem());
  if (ptx::lane_id() != 0) return;
  store_row(&map, ptx::dynamic_smem());
  ptx::bulk_wait_group_read<0>();
  ptx::st_global_4(output, 0);
}

FFPA_KERNEL(32, 1) void two_stores_to_one_row_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  write_row(ptx::dynamic_smem());
  if (ptx::lane_id() != 0) return;
  store_row(&map, ptx::dynamic_smem());
  ptx::bulk_wait_group_read<0>();
  store_row(&map, ptx::dynamic_smem());
  ptx::bulk_wait_group_read<0>();
}

// Warp 0 stores a row, warp 1 loads it. In all but the last two, a wait, fence or barrier between them is missing,
// misplaced or the wrong one.
enum class Between { kNoFence, kFenceBeforeWait, kLateFence, kSharedFence, kNoBarrier, kStorerFences, kLoaderFences };
template <Between kBetween>
FFPA_KERNEL(64, 1)
void read_back_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t* output) {
  const uint32_t smem = ptx::dynamic_smem();
  const bool first = ptx::thread_x() < 32;
  if (first) write_row(smem);
  if (ptx::thread_x() == 0) {
    store_row(&map, smem);
    if (kBetween == Between::kFenceBeforeWait) ptx::fence_proxy_async_global();
    if (kBetween == Between::kNoBarrier) ptx::bulk_wait_group_read<0>();
    if (kBetween != Between::kNoBarrier) ptx::bulk_wait_group<0>();
    if (kBetween == Between::kStorerFences) ptx::fence_proxy_async_global();
    if (kBetween == Between::kSharedFence) ptx::fence_proxy_async();
  }
  ptx::sync_block();
  if (ptx::thread_x() == 0) {
    if (kBetween == Between::kLateFence) ptx::fence_proxy_async_global();
    if (kBetween == Between::kNoBarrier) {
      ptx::bulk_wait_group<0>();
      ptx::fence_proxy_async_global();
    }
  }
  if (ptx::thread_x() == 32) {
    if (kBetween == Between::kLoaderFences) ptx::fence_proxy_async_global();
    load_row(&map, smem + kReadBackOffset);
    ptx::st_global_4(output + 512, ptx::ld_shared_4(smem + kReadBackOffset));
  }
}

// Lane kLoader of the same warp loads the row: the lane that has waited (0) needs neither fence nor __syncwarp.
template <int kLoader>
FFPA_KERNEL(32, 1)
void read_back_in_warp_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t* output) {
  const uint32_t smem = ptx::dynamic_smem();
  write_row(smem);
  if (ptx::lane_id() == 0) {
    store_row(&map, smem);
    ptx::bulk_wait_group<0>();
    if (kLoader != 0) ptx::fence_proxy_async_global();
  }
  if (ptx::vote_ballot(true) == 0 || ptx::lane_id() != kLoader) return;  // a vote orders nothing
  load_row(&map, smem + kReadBackOffset);
  ptx::st_global_4(output + 512, ptx::ld_shared_4(smem + kReadBackOffset));
}

FFPA_KERNEL(32, 1) void misaligned_source_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  if (ptx::lane_id() == 0) store_row(&map, ptx::dynamic_smem() + 64);
}

FFPA_KERNEL(32, 1) void source_past_end_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  if (ptx::lane_id() == 0) store_row(&map, ptx::dynamic_smem() + (16 << 10));
}

FFPA_KERNEL(32, 1) void wrong_rank_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  if (ptx::lane_id() == 0) ptx::tma_store_4d(&map, ptx::dynamic_smem(), 0, 0, 0, 0);
}

// The kernel is right, but the map names memory that must not be written, or is not there.
FFPA_KERNEL(32, 1) void store_to_the_last_row_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  write_row(ptx::dynamic_smem());
  if (ptx::lane_id() != 0) return;
  store_row(&map, ptx::dynamic_smem(), 3);
  ptx::bulk_wait_group<0>();
}

// Two blocks meet in a row. With kLoads the second one loads what the first one stores, otherwise both store.
template <bool kLoads>
FFPA_KERNEL(32, 1)
void blocks_meet_in_a_row_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t*) {
  write_row(ptx::dynamic_smem());
  if (ptx::lane_id() != 0) return;
  if (kLoads && ptx::block_x() == 1) {
    load_row(&map, ptx::dynamic_smem() + kReadBackOffset);
    return;
  }
  store_row(&map, ptx::dynamic_smem());
  ptx::bulk_wait_group<0>();
}

// Block 0 stores a row and says so; block 1 waits for that and loads the row by TMA or in the ordinary way.
enum class Told { kAll, kNoFence, kNoFenceToOrdinaryLoads, kOnlyRead, kLoadsBeforeRelease };
template <Told kTold>
FFPA_KERNEL(32, 1)
void tell_another_block_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map, uint32_t* output) {
  const uint32_t smem = ptx::dynamic_smem();
  uint32_t* const flag = output + kFlagWord;
  const bool stores = ptx::block_x() == 0;
  if (stores) write_row(smem);
  if (ptx::lane_id() != 0) return;
  if (kTold == Told::kLoadsBeforeRelease) {
    const uint32_t barrier = smem + kLoadBarrierOffset;
    if (!stores) {
      ptx::mbarrier_init(barrier, 1);
      ptx::mbarrier_arrive_expect_tx(barrier, kStoredRowBytes);
      ptx::tma_load_2d(smem, &map, barrier, 0, 0);
      ptx::st_release_global_4(flag, 1);  // the load may not have read yet
      ptx::mbarrier_wait(barrier, 0);
    } else {
      ptx::wait_global_at_least(flag, 1);
      store_row(&map, smem);
      ptx::bulk_wait_group<0>();
    }
    return;
  }
  if (stores) {
    store_row(&map, smem);
    if (kTold == Told::kOnlyRead) ptx::bulk_wait_group_read<0>();
    if (kTold != Told::kOnlyRead) ptx::bulk_wait_group<0>();
    if (kTold != Told::kNoFence && kTold != Told::kNoFenceToOrdinaryLoads) ptx::fence_proxy_async_global();
    ptx::st_release_global_4(flag, 1);
    if (kTold == Told::kOnlyRead) ptx::bulk_wait_group<0>();
    return;
  }
  ptx::wait_global_at_least(flag, 1);
  if (kTold == Told::kNoFenceToOrdinaryLoads) {
    ptx::st_global_4(output + 512, ptx::ld_global_4(output));
  } else {
    load_row(&map, smem);
    ptx::st_global_4(output + 512, ptx::ld_shared_4(smem));
  }
}

// Ones are added to the row; each of these forgets something. With two blocks, they take turns by a flag.
enum class AddBug { kNone, kOverwritesSource, kAddsTwice, kUnordered, kNoFence, kOddBytes };
template <AddBug kBug>
FFPA_KERNEL(32, 1)
void add_row_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap, uint32_t* output) {
  const uint32_t smem = ptx::dynamic_smem();
  uint32_t* const flag = output + kFlagWord;
  write_row(smem);
  if (ptx::lane_id() == 0) {
    if (kBug != AddBug::kUnordered) ptx::wait_global_at_least(flag, ptx::block_x());
    if (kBug != AddBug::kNoFence) ptx::fence_proxy_async_global();
    ptx::bulk_reduce_add_f32(output, smem, kBug == AddBug::kOddBytes ? 100 : kStoredRowBytes);
    if (kBug == AddBug::kAddsTwice) ptx::bulk_reduce_add_f32(output, smem, kStoredRowBytes);
    ptx::bulk_commit_group();
    if (kBug == AddBug::kOverwritesSource) ptx::st_shared_4(smem, 0);
    ptx::bulk_wait_group<0>();
    ptx::red_add_release_global(flag, 1);
  }
}

}  // namespace ffpa::testing
