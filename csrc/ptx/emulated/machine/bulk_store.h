// TMA stores: the shared memory that pending ones may still read and, by bytes, the global memory that they write.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "ptx/emulated/machine/call_site.h"
#include "ptx/tensor_map_spec.h"

namespace ffpa::emu {

struct Block;
struct Lane;

// The step that a store has reached, as far as its thread's waits guarantee.
enum class BulkStep { kIssued, kRead, kComplete };

// One TMA store of the cluster that runs.
struct BulkStore {
  BulkStore(Lane* lane, const TensorMapSpec& spec, uint32_t source, uint32_t group, CallSite site)
      : lane(lane), spec(spec), source(source), group(group), site(site) {}

  Lane* lane;
  TensorMapSpec spec;
  int coordinates[kMaxTensorRank] = {};
  uint32_t source;
  uint32_t group;
  CallSite site;
  BulkStep step = BulkStep::kIssued;
  std::vector<uint8_t> bytes;  // bytes of the box, from when they are read until they are written
  uint32_t complete_at = 0;    // time of the lane's warp
  uint32_t complete_in_sync_epoch = 0;

  // A fence.proxy.async.global by a warp that knew of the completion. A warp that knows of such a fence may load the
  // bytes through the async proxy.
  struct Fence {
    int warp;
    uint32_t time;
  };
  std::vector<Fence> fences;
};

// The bulk store that last wrote each place in global memory.
class BulkFootprint {
 public:
  void clear() { pages_.clear(); }
  void write(uintptr_t address, size_t bytes, uint32_t store);

  // Calls visit(store) for the stores that wrote some of these bytes, once for each run of bytes of one store.
  template <class Visit>
  void for_each_store(uintptr_t address, size_t bytes, Visit visit) const;

 private:
  static constexpr uintptr_t kPageBytes = 4096, kUnitBytes = 2;
  using Page = std::array<uint32_t, kPageBytes / kUnitBytes>;  // 1 + store, or 0 for none
  std::unordered_map<uintptr_t, Page> pages_;
};

// `coordinates` has spec.rank entries, innermost first.
void tma_store(const TensorMapSpec& spec, uint32_t source, const int* coordinates, int coordinate_count, CallSite site);

void bulk_commit_group(CallSite site);

// Brings all but `pending_groups` of the lane's groups to this step.
void bulk_wait_group(int pending_groups, BulkStep step, CallSite site);

void fence_proxy_async_global(CallSite site);

// The first is called when a lane exits, the second when the cluster has ended.
void check_bulk_stores_at_exit(const Lane& lane);
void finish_bulk_stores();

// Checks an access to global memory for races with the bytes of a bulk store.
enum class GlobalProxy { kGeneric, kAsync };
void check_against_bulk_stores(uintptr_t address, uint32_t bytes, GlobalProxy proxy, const char* what, CallSite site);

}  // namespace ffpa::emu
