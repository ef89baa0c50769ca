// TMA (sm_90): bulk copies of boxes of a tensor between global and shared memory, by the async proxy.
//
// One thread issues a copy. Coordinates count elements, innermost dimension first. Shared addresses are 128-byte
// aligned, and 1024-byte aligned when a wgmma descriptor with 128-byte swizzle is to name them.
//
// A load completes on an mbarrier; the part of the box that lies outside the tensor becomes zero.
//
// A store leaves everything outside the tensor alone. It completes in two steps; its thread commits it and waits for
// each. After bulk_wait_group_read the shared memory may be overwritten; after bulk_wait_group the thread sees what the
// store wrote, and other threads do after a barrier. The thread exits after the first step at the earliest.
//   before it:  stores to shared memory, fence_proxy_async by the threads that made them, a barrier, the store
//   after it:   bulk_wait_group, fence_proxy_async_global, a barrier, loads of the written bytes by its block's threads
//
// The PTX manual has it in "Data Movement and Conversion Instructions: cp.async.bulk.tensor".
#pragma once

#include <cuda.h>

#include <cstdint>

#include "base/compiler.h"
#include "ptx/descriptors.h"
#include "ptx/launch_types.h"
#include "ptx/native/driver.h"

namespace ffpa::ptx {

using TensorMap = CUtensorMap;  // a kernel takes it as `const FFPA_GRID_CONSTANT TensorMap`

// The instruction has one form for loads: it writes to the shared memory of the cluster (a plain address means the own
// block) and completes on an mbarrier of the destination block.
template <Evict kEvict = Evict::kNormal>
FFPA_DEVICE void tma_load_2d(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0, int c1) {
  if constexpr (kEvict == Evict::kNormal) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            destination_smem),
        "l"(map), "r"(barrier_smem), "r"(c0), "r"(c1)
        : "memory");
  } else {
    asm volatile(
        "{\n  .reg .b64 policy;\n  createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "  cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4}], [%2], policy;\n}" ::"r"(destination_smem),
        "l"(map), "r"(barrier_smem), "r"(c0), "r"(c1)
        : "memory");
  }
}

FFPA_DEVICE void tma_load_4d(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0, int c1,
                             int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(destination_smem),
      "l"(map), "r"(barrier_smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

FFPA_DEVICE void tma_load_5d(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0, int c1,
                             int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(destination_smem),
      "l"(map), "r"(barrier_smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// A multicast sends the box to the same address in every block whose bit is set in `block_mask`, and completes on the
// barrier at the same address in each.
FFPA_DEVICE void tma_load_4d_multicast(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0,
                                       int c1, int c2, int c3, uint16_t block_mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination_smem),
      "l"(map), "r"(barrier_smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(block_mask)
      : "memory");
}

// Stores complete in bulk groups of the issuing thread.
template <Evict kEvict = Evict::kNormal>
FFPA_DEVICE void tma_store_2d(const TensorMap* map, uint32_t source_smem, int c0, int c1) {
  if constexpr (kEvict == Evict::kNormal) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(source_smem), "r"(c0), "r"(c1)
                 : "memory");
  } else {
    asm volatile(
        "{\n  .reg .b64 policy;\n  createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "  cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], policy;\n}" ::"l"(
            map),
        "r"(source_smem), "r"(c0), "r"(c1)
        : "memory");
  }
}

FFPA_DEVICE void tma_store_4d(const TensorMap* map, uint32_t source_smem, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(source_smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

FFPA_DEVICE void tma_store_5d(const TensorMap* map, uint32_t source_smem, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
               "r"(source_smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// cp.reduce.async.bulk, "Data Movement and Conversion Instructions: cp.reduce.async.bulk": adds floats of shared memory
// to floats of global memory, in the thread's bulk groups, as stores are. Addresses and bytes are multiples of 16. A
// sum depends on the order of its terms, so the next addition to the same floats waits until this one is complete, and
// for the fence that loads by TMA need.
FFPA_DEVICE void bulk_reduce_add_f32(void* destination_gmem, uint32_t source_smem, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination_gmem),
               "r"(source_smem), "r"(bytes)
               : "memory");
}

// cp.async.bulk.commit_group: makes a group of the thread's stores since the last commit.
FFPA_DEVICE void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read: waits until at most `kPending` groups of this thread still read their shared memory.
template <int kPending>
FFPA_DEVICE void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// cp.async.bulk.wait_group: waits until at most `kPending` groups of this thread are incomplete; what the other groups
// wrote is then visible to it.
template <int kPending>
FFPA_DEVICE void bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// cp.async.bulk: copies from the shared memory of this block to that of block `rank` of the cluster, and completes on
// the mbarrier at this address there. Whoever has waited for that phase knows that the source has been read, too.
FFPA_DEVICE void copy_to_block(uint32_t destination_smem, uint32_t source_smem, uint32_t bytes, uint32_t barrier_smem,
                               uint32_t rank) {
  asm volatile(
      "{\n"
      "  .reg .b32 destination, barrier;\n"
      "  mapa.shared::cluster.u32 destination, %0, %4;\n"
      "  mapa.shared::cluster.u32 barrier, %3, %4;\n"
      "  cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [destination], [%1], %2, [barrier];\n"
      "}" ::"r"(destination_smem),
      "r"(source_smem), "r"(bytes), "r"(barrier_smem), "r"(rank)
      : "memory");
}

// fence.proxy.async: makes the writes to shared memory that this thread made through the generic proxy (st.shared,
// stmatrix) visible to its later wgmma and bulk copies. `.shared::cta` is enough, and a full fence costs more.
FFPA_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Does the same for global memory: writes there that this thread knows of before the fence are visible to bulk copies
// after it.
FFPA_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Encodes `spec` into `map`, on the host.
inline LaunchStatus encode_tensor_map(TensorMap& map, const TensorMapSpec& spec) {
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  if (spec.swizzle == Swizzle::k128Bytes) swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  if (spec.swizzle == Swizzle::k64Bytes) swizzle = CU_TENSOR_MAP_SWIZZLE_64B;
  if (spec.swizzle == Swizzle::k32Bytes) swizzle = CU_TENSOR_MAP_SWIZZLE_32B;
  cuuint64_t size[kMaxTensorRank], stride[kMaxTensorRank];
  cuuint32_t box[kMaxTensorRank], element_stride[kMaxTensorRank];
  for (int i = 0; i < spec.rank; ++i) {
    size[i] = spec.size[i];
    box[i] = spec.box[i];
    element_stride[i] = 1;
    if (i > 0) stride[i - 1] = spec.stride_bytes[i];
  }
  const LaunchStatus status =
      encode_tiled(&map, spec.bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, spec.rank,
                   const_cast<void*>(spec.base), size, stride, box, element_stride, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status.code <= 0 ? status : LaunchStatus{status.code, "cuTensorMapEncodeTiled refused the tensor map"};
}

}  // namespace ffpa::ptx
