// Emulated side of ptx/native/tma.cuh.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/bulk_store.h"
#include "ptx/emulated/machine/tma.h"
#include "ptx/launch_types.h"
#include "ptx/tensor_map_spec.h"

namespace ffpa::ptx {

// The description itself stands for the hardware's encoded form.
struct alignas(64) TensorMap {
  TensorMapSpec spec;
};

template <Evict = Evict::kNormal>
inline void tma_load_2d(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0, int c1,
                        emu::CallSite site = emu::CallSite()) {
  const int coordinates[] = {c0, c1};
  emu::tma_load(destination_smem, map->spec, barrier_smem, coordinates, 2, emu::kOwnBlock, site);
}

inline void tma_load_3d(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0, int c1, int c2,
                        emu::CallSite site = emu::CallSite()) {
  const int coordinates[] = {c0, c1, c2};
  emu::tma_load(destination_smem, map->spec, barrier_smem, coordinates, 3, emu::kOwnBlock, site);
}

inline void tma_load_4d(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0, int c1, int c2,
                        int c3, emu::CallSite site = emu::CallSite()) {
  const int coordinates[] = {c0, c1, c2, c3};
  emu::tma_load(destination_smem, map->spec, barrier_smem, coordinates, 4, emu::kOwnBlock, site);
}

inline void tma_load_3d_multicast(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0,
                                  int c1, int c2, uint16_t block_mask, emu::CallSite site = emu::CallSite()) {
  const int coordinates[] = {c0, c1, c2};
  emu::tma_load(destination_smem, map->spec, barrier_smem, coordinates, 3, block_mask, site);
}

inline void tma_load_4d_multicast(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0,
                                  int c1, int c2, int c3, uint16_t block_mask, emu::CallSite site = emu::CallSite()) {
  const int coordinates[] = {c0, c1, c2, c3};
  emu::tma_load(destination_smem, map->spec, barrier_smem, coordinates, 4, block_mask, site);
}

template <Evict = Evict::kNormal>
inline void tma_store_2d(const TensorMap* map, uint32_t source_smem, int c0, int c1,
                         emu::CallSite site = emu::CallSite()) {
  const int coordinates[] = {c0, c1};
  emu::tma_store(map->spec, source_smem, coordinates, 2, site);
}

inline void tma_store_4d(const TensorMap* map, uint32_t source_smem, int c0, int c1, int c2, int c3,
                         emu::CallSite site = emu::CallSite()) {
  const int coordinates[] = {c0, c1, c2, c3};
  emu::tma_store(map->spec, source_smem, coordinates, 4, site);
}

inline void bulk_commit_group(emu::CallSite site = emu::CallSite()) { emu::bulk_commit_group(site); }

template <int kPending>
inline void bulk_wait_group_read(emu::CallSite site = emu::CallSite()) {
  emu::bulk_wait_group(kPending, emu::BulkStep::kRead, site);
}

template <int kPending>
inline void bulk_wait_group(emu::CallSite site = emu::CallSite()) {
  emu::bulk_wait_group(kPending, emu::BulkStep::kComplete, site);
}

inline void fence_proxy_async() { emu::fence_proxy_async(); }

inline void fence_proxy_async_global(emu::CallSite site = emu::CallSite()) { emu::fence_proxy_async_global(site); }

inline LaunchStatus encode_tensor_map(TensorMap& map, const TensorMapSpec& spec) {
  map.spec = spec;
  const char* problem = emu::problem_with_tensor_map(spec);
  return problem ? LaunchStatus{1, problem} : LaunchStatus{};
}

}  // namespace ffpa::ptx
