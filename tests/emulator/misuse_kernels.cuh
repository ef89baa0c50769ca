// Kernels that misuse one thing each, for the detectors that no attention kernel would trip.
#pragma once

#include "ptx/instructions.cuh"

namespace ffpa::testing {

// Two warps wait at different barriers for each other.
FFPA_KERNEL(64, 1) void deadlock_kernel(const uint32_t*, uint32_t*) { ptx::bar_sync(ptx::thread_x() < 32 ? 1 : 2, 64); }

FFPA_KERNEL(64, 1) void barrier_count_kernel(const uint32_t*, uint32_t*) {
  ptx::bar_sync(1, ptx::thread_x() < 32 ? 64 : 32);
}

FFPA_KERNEL(64, 1) void barrier_not_a_warp_multiple_kernel(const uint32_t*, uint32_t*) { ptx::bar_sync(1, 40); }

// Half of the warp leaves before a collective.
FFPA_KERNEL(32, 1) void exit_before_collective_kernel(const uint32_t*, uint32_t* output) {
  if (ptx::lane_id() >= 16) return;
  ptx::st_global_4(output + ptx::lane_id(), ptx::shfl_xor(1, 1));
}

// Both halves of the warp shuffle, from different lines.
FFPA_KERNEL(32, 1) void divergent_shuffle_kernel(const uint32_t*, uint32_t* output) {
  int value = 0;
  if (ptx::lane_id() < 16) {
    value = ptx::shfl_xor(1, 1);
  } else {
    value = ptx::shfl_xor(2, 1);
  }
  ptx::st_global_4(output + ptx::lane_id(), value);
}

FFPA_KERNEL(32, 1) void copy_never_awaited_kernel(const uint32_t* input, uint32_t*) {
  ptx::cp_async_16_or_zero(true, ptx::dynamic_smem() + ptx::lane_id() * 16, input + ptx::lane_id() * 4);
  ptx::cp_async_commit_group();
}

// wait_group covers committed groups only.
FFPA_KERNEL(32, 1) void copy_never_committed_kernel(const uint32_t* input, uint32_t* output) {
  const uint32_t mine = ptx::dynamic_smem() + ptx::lane_id() * 16;
  ptx::cp_async_16_or_zero(true, mine, input + ptx::lane_id() * 4);
  ptx::cp_async_wait_group<0>();
  ptx::st_global_4(output + ptx::lane_id(), ptx::ld_shared_4(mine));
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
}

// An mbarrier tracks the copies and they may well have landed, but the thread has not waited for it.
FFPA_KERNEL(32, 1) void tracked_copy_not_awaited_kernel(const uint32_t* input, uint32_t* output) {
  const uint32_t barrier = ptx::dynamic_smem();
  const uint32_t mine = barrier + 128 + ptx::lane_id() * 16;
  if (ptx::lane_id() == 0) ptx::mbarrier_init(barrier, 32);
  ptx::sync_block();
  ptx::cp_async_16_or_zero(true, mine, input + ptx::lane_id() * 4);
  ptx::cp_async_mbarrier_arrive(barrier);
  for (int i = 0; i < 32; ++i) ptx::sync_warp();
  ptx::st_global_4(output + ptx::lane_id(), ptx::ld_shared_4(mine));
  ptx::mbarrier_wait(barrier, 0);
}

// The arrival of the copies says nothing about the ordinary stores before it.
FFPA_KERNEL(64, 1) void store_before_tracked_copy_kernel(const uint32_t* input, uint32_t* output) {
  const uint32_t barrier = ptx::dynamic_smem();
  const uint32_t mine = barrier + 128 + ptx::lane_id() * 16;
  if (ptx::thread_x() == 0) ptx::mbarrier_init(barrier, 32);
  ptx::sync_block();
  if (ptx::thread_x() < 32) {
    ptx::st_shared_4(mine, 1);
    ptx::cp_async_16_or_zero(true, mine + 512, input + ptx::lane_id() * 4);
    ptx::cp_async_mbarrier_arrive(barrier);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
  } else {
    ptx::mbarrier_wait(barrier, 0);
    ptx::st_global_4(output + ptx::lane_id(), ptx::ld_shared_4(mine) + ptx::ld_shared_4(mine + 512));
  }
}

// Warp 1 knows warp 0's copies from the mbarrier and puts its own in their place. Warp 0's wait does not cover those.
FFPA_KERNEL(64, 1) void wait_for_overwritten_copy_kernel(const uint32_t* input, uint32_t* output) {
  const uint32_t barrier = ptx::dynamic_smem();
  const uint32_t mine = barrier + 128 + ptx::lane_id() * 16;
  if (ptx::thread_x() == 0) ptx::mbarrier_init(barrier, 32);
  ptx::sync_block();
  if (ptx::thread_x() < 32) {
    ptx::cp_async_16_or_zero(true, mine, input + ptx::lane_id() * 4);
    ptx::cp_async_mbarrier_arrive(barrier);
    ptx::bar_sync(1, 64);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    ptx::bar_sync(2, 64);
  } else {
    ptx::mbarrier_wait(barrier, 0);
    ptx::cp_async_16_or_zero(true, mine, input + ptx::lane_id() * 4);
    ptx::bar_sync(1, 64);
    ptx::bar_sync(2, 64);
    ptx::st_global_4(output + ptx::lane_id(), ptx::ld_shared_4(mine));
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
  }
}

FFPA_KERNEL(32, 1) void misaligned_shared_kernel(const uint32_t*, uint32_t*) {
  const uint32_t value[4] = {};
  ptx::st_shared_16(ptx::dynamic_smem() + ptx::lane_id() * 8, value);
}

FFPA_KERNEL(32, 1) void misaligned_ldmatrix_kernel(const uint32_t*, uint32_t* output) {
  uint32_t tile[4];
  ptx::ldmatrix_x4(tile, ptx::dynamic_smem() + ptx::lane_id() * 8);
  ptx::st_global_4(output + ptx::lane_id(), tile[0]);
}

FFPA_KERNEL(32, 1) void misaligned_global_kernel(const uint32_t* input, uint32_t* output) {
  uint32_t value[4];
  ptx::ld_global_16(value, input + ptx::lane_id());
  ptx::st_global_4(output + ptx::lane_id(), value[0]);
}

FFPA_KERNEL(32, 1) void shared_past_end_kernel(const uint32_t*, uint32_t* output) {
  ptx::st_global_4(output + ptx::lane_id(), ptx::ld_shared_4(ptx::dynamic_smem() + 4096 - 64 + ptx::lane_id() * 4));
}

// The address is built without the base of dynamic shared memory.
FFPA_KERNEL(32, 1) void shared_without_base_kernel(const uint32_t*, uint32_t*) {
  ptx::st_shared_4(ptx::lane_id() * 4, 0);
}

FFPA_KERNEL(32, 1) void global_past_end_kernel(const uint32_t* input, uint32_t* output) {
  ptx::st_global_4(output + ptx::lane_id(), ptx::ld_global_4(input + 1024 - 16 + ptx::lane_id()));
}

FFPA_KERNEL(32, 1) void global_before_start_kernel(const uint32_t* input, uint32_t* output) {
  ptx::st_global_4(output + ptx::lane_id() - 1, ptx::ld_global_4(input));
}

FFPA_KERNEL(32, 1) void store_to_read_only_kernel(const uint32_t* input, uint32_t*) {
  ptx::st_global_4(const_cast<uint32_t*>(input) + ptx::lane_id(), 1);
}

FFPA_KERNEL(32, 1) void plain_pointer_kernel(const uint32_t*, uint32_t*) {
  *reinterpret_cast<volatile uint32_t*>(uintptr_t(64)) = 1;
}

FFPA_KERNEL(32, 1) void endless_loop_kernel(const uint32_t* input, uint32_t*) {
  while (ptx::ld_global_4(input) != 0xdeadbeef) {
  }
}

// Another lane's store is read without __syncwarp.
FFPA_KERNEL(32, 1) void no_syncwarp_kernel(const uint32_t*, uint32_t* output) {
  const uint32_t smem = ptx::dynamic_smem();
  ptx::st_shared_4(smem + ptx::lane_id() * 4, ptx::lane_id());
  ptx::st_global_4(output + ptx::lane_id(), ptx::ld_shared_4(smem + (31 - ptx::lane_id()) * 4));
}

FFPA_KERNEL(64, 1) void no_syncthreads_kernel(const uint32_t*, uint32_t* output) {
  const uint32_t smem = ptx::dynamic_smem();
  ptx::st_shared_4(smem + ptx::thread_x() * 4, ptx::thread_x());
  ptx::sync_warp();
  ptx::st_global_4(output + ptx::thread_x(), ptx::ld_shared_4(smem + (63 - ptx::thread_x()) * 4));
}

FFPA_KERNEL(64, 1) void write_write_kernel(const uint32_t*, uint32_t*) {
  ptx::st_shared_4(ptx::dynamic_smem() + ptx::lane_id() * 4, ptx::thread_x());
}

FFPA_KERNEL(32, 1) void blocks_write_the_same_kernel(const uint32_t*, uint32_t* output) {
  ptx::st_global_4(output + ptx::block_x() * 16 + ptx::lane_id(), 1);
}

// Each block reads half of what the other one writes; the block that runs later is found.
FFPA_KERNEL(32, 1) void block_reads_what_another_wrote_kernel(const uint32_t*, uint32_t* output) {
  ptx::st_global_4(output + ptx::block_x() * 32 + ptx::lane_id(), 1);
  ptx::ld_global_4(output + 16 + ptx::lane_id());
}

// This is no error: shared memory that nobody has written is NaN.
FFPA_KERNEL(32, 1) void read_uninitialised_kernel(const uint32_t*, uint32_t* output) {
  ptx::st_global_4(output + ptx::lane_id(), ptx::ld_shared_4(ptx::dynamic_smem() + ptx::lane_id() * 4));
}

// Stores one word per lane, `stride` words apart.
FFPA_KERNEL(32, 1) void strided_store_kernel(int stride) {
  ptx::st_shared_4(ptx::dynamic_smem() + ptx::lane_id() * stride * 4, 0);
  ptx::sync_warp();
}

FFPA_KERNEL(32, 1) void strided_store_16_kernel(int stride) {
  const uint32_t value[4] = {};
  ptx::st_shared_16(ptx::dynamic_smem() + ptx::lane_id() * stride * 4, value);
  ptx::sync_warp();
}

FFPA_KERNEL(32, 1) void strided_ldmatrix_kernel(int stride) {
  uint32_t tile[4];
  ptx::ldmatrix_x4(tile, ptx::dynamic_smem() + ptx::lane_id() * stride * 4);
}

}  // namespace ffpa::testing
