// Kernels that misuse sm_90a instructions, each in one way.
#pragma once

#include "ptx/instructions.cuh"

namespace ffpa::testing {

// Writes what one product of ones gives, with or without a fence between the stores and the product.
template <bool kFence>
FFPA_KERNEL(128, 1)
void proxy_fence_kernel(const uint32_t*, uint32_t* output) {
  const uint32_t smem = ptx::dynamic_smem();
  for (int i = ptx::thread_x(); i < 4096; i += 128) ptx::st_shared_4(smem + i * 4, 0x3c003c00);
  if (kFence) ptx::fence_proxy_async();
  ptx::sync_block();
  float d[32];
  ptx::wgmma_fence();
  ptx::wgmma_ss<Half, 64>(d, ptx::wgmma_descriptor(smem, 16, 1024, Swizzle::k128Bytes),
                          ptx::wgmma_descriptor(smem + 8192, 16, 1024, Swizzle::k128Bytes), false);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  ptx::st_global_4(output + ptx::thread_x(), float_bits(d[0]));
}

FFPA_KERNEL(32, 1) void mbarrier_without_init_kernel(const uint32_t*, uint32_t*) {
  ptx::mbarrier_arrive(ptx::dynamic_smem());
}

FFPA_KERNEL(32, 1) void mbarrier_too_many_arrivals_kernel(const uint32_t*, uint32_t*) {
  const uint32_t barrier = ptx::dynamic_smem();
  if (ptx::lane_id() == 0) ptx::mbarrier_init(barrier, 1);
  ptx::sync_block();
  ptx::mbarrier_arrive_expect_tx(barrier, 16);
}

FFPA_KERNEL(32, 1) void mbarrier_never_completes_kernel(const uint32_t*, uint32_t*) {
  const uint32_t barrier = ptx::dynamic_smem();
  if (ptx::lane_id() == 0) ptx::mbarrier_init(barrier, 33);
  ptx::sync_block();
  ptx::mbarrier_arrive(barrier);
  ptx::mbarrier_wait(barrier, 0);
}

FFPA_KERNEL(32, 1) void misaligned_mbarrier_kernel(const uint32_t*, uint32_t*) {
  ptx::mbarrier_init(ptx::dynamic_smem() + 4, 1);
}

FFPA_KERNEL(32, 1) void cluster_wait_without_arrive_kernel(const uint32_t*, uint32_t*) { ptx::cluster_wait(); }

FFPA_KERNEL(32, 1) void remote_rank_kernel(const uint32_t*, uint32_t*) {
  const uint32_t barrier = ptx::dynamic_smem();
  if (ptx::lane_id() == 0) ptx::mbarrier_init(barrier, 32);
  ptx::mbarrier_arrive_remote(barrier, 1);
}

// The products are never waited for.
FFPA_KERNEL(128, 1) void products_in_flight_at_exit_kernel(const uint32_t*, uint32_t*) {
  const uint32_t smem = ptx::dynamic_smem();
  float d[32];
  ptx::wgmma_fence();
  ptx::wgmma_ss<Half, 64>(d, ptx::wgmma_descriptor(smem, 16, 1024, Swizzle::k128Bytes),
                          ptx::wgmma_descriptor(smem + 8192, 16, 1024, Swizzle::k128Bytes), false);
  ptx::wgmma_commit_group();
}

FFPA_KERNEL(128, 1) void descriptor_past_end_kernel(const uint32_t*, uint32_t*) {
  const uint32_t smem = ptx::dynamic_smem();
  float d[32];
  ptx::wgmma_fence();
  ptx::wgmma_ss<Half, 64>(d, ptx::wgmma_descriptor(smem, 16, 1024, Swizzle::k128Bytes),
                          ptx::wgmma_descriptor(smem + 16384, 16, 1024, Swizzle::k128Bytes), false);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
}

// The kernel ends before the copy has landed.
FFPA_KERNEL(32, 1)
void tma_in_flight_at_exit_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map) {
  const uint32_t smem = ptx::dynamic_smem();
  if (ptx::lane_id() != 0) return;
  ptx::mbarrier_init(smem + 8192, 1);
  ptx::mbarrier_arrive_expect_tx(smem + 8192, 128);
  ptx::tma_load_2d(smem, &map, smem + 8192, 0, 0);
}

// Ordinary stores land under a copy in flight.
FFPA_KERNEL(32, 1)
void store_under_tma_kernel(const FFPA_GRID_CONSTANT ptx::TensorMap map) {
  const uint32_t smem = ptx::dynamic_smem();
  if (ptx::lane_id() == 0) {
    ptx::mbarrier_init(smem + 8192, 1);
    ptx::mbarrier_arrive_expect_tx(smem + 8192, 128);
    ptx::tma_load_2d(smem, &map, smem + 8192, 0, 0);
    ptx::st_shared_4(smem, 1);
  }
  ptx::sync_block();
  ptx::mbarrier_wait(smem + 8192, 0);
}

}  // namespace ffpa::testing
