// Emulated side of ptx/native/tma.cuh.
#pragma once

#include <cstdint>
#include <vector>

#include "ptx/emulated/call_site.cuh"
#include "ptx/launch_types.h"
#include "ptx/tensor_map_spec.h"

namespace ffpa::emu {

inline constexpr uint16_t kOwnBlock = 0;  // block mask that means the own block only

// Coordinates are innermost first.
void tma_load(uint32_t destination, const TensorMapSpec& spec, uint32_t barrier, const std::vector<int>& coordinates,
              uint16_t block_mask, CallSite site);
void tma_store(const TensorMapSpec& spec, uint32_t source, const std::vector<int>& coordinates, CallSite site);

// The step that a store has reached, as far as its thread's waits guarantee.
enum class BulkStep { kIssued, kRead, kComplete };

// Brings all but `pending_groups` of the lane's groups to this step.
void bulk_wait(int pending_groups, BulkStep step, CallSite site);

}  // namespace ffpa::emu

namespace ffpa::ptx {

// The description itself stands for the hardware's encoded form.
struct alignas(64) TensorMap {
  TensorMapSpec spec;
};

template <Evict = Evict::kNormal>
inline void tma_load_2d(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0, int c1,
                        CallSite site = CallSite()) {
  emu::tma_load(destination_smem, map->spec, barrier_smem, {c0, c1}, emu::kOwnBlock, site);
}

inline void tma_load_4d(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0, int c1, int c2,
                        int c3, CallSite site = CallSite()) {
  emu::tma_load(destination_smem, map->spec, barrier_smem, {c0, c1, c2, c3}, emu::kOwnBlock, site);
}

inline void tma_load_5d(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0, int c1, int c2,
                        int c3, int c4, CallSite site = CallSite()) {
  emu::tma_load(destination_smem, map->spec, barrier_smem, {c0, c1, c2, c3, c4}, emu::kOwnBlock, site);
}

inline void tma_load_4d_multicast(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0,
                                  int c1, int c2, int c3, uint16_t block_mask, CallSite site = CallSite()) {
  emu::tma_load(destination_smem, map->spec, barrier_smem, {c0, c1, c2, c3}, block_mask, site);
}

template <Evict = Evict::kNormal>
inline void tma_store_2d(const TensorMap* map, uint32_t source_smem, int c0, int c1, CallSite site = CallSite()) {
  emu::tma_store(map->spec, source_smem, {c0, c1}, site);
}

inline void tma_store_4d(const TensorMap* map, uint32_t source_smem, int c0, int c1, int c2, int c3,
                         CallSite site = CallSite()) {
  emu::tma_store(map->spec, source_smem, {c0, c1, c2, c3}, site);
}

void bulk_commit_group(CallSite site = CallSite());

template <int kPending>
inline void bulk_wait_group_read(CallSite site = CallSite()) {
  emu::bulk_wait(kPending, emu::BulkStep::kRead, site);
}

template <int kPending>
inline void bulk_wait_group(CallSite site = CallSite()) {
  emu::bulk_wait(kPending, emu::BulkStep::kComplete, site);
}

// One lane's fence counts for its warp: the race check knows warps, not lanes.
void fence_proxy_async();
void fence_proxy_async_global(CallSite site = CallSite());

LaunchStatus encode_tensor_map(TensorMap& map, const TensorMapSpec& spec);

}  // namespace ffpa::ptx
