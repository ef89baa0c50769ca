// TMA stores: what is pending of them in shared memory and, by bytes, in global memory.
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

// How far a store has come, as far as its thread's waits guarantee.
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
  std::vector<uint8_t> bytes;  // of the box, from the moment that they were read to the one they were written
  uint32_t complete_at = 0;    // time of the lane's warp
  uint32_t complete_in_sync_epoch = 0;

  // fence.proxy.async.global by a warp that knew of the completion: who knows of one may load through the async proxy.
  struct Fence {
    int warp;
    uint32_t time;
  };
  std::vector<Fence> fences;
};

// Which bulk store wrote where last.
class BulkFootprint {
 public:
  void clear() { pages_.clear(); }
  void write(uintptr_t address, size_t bytes, uint32_t store);

  // Calls visit(store) for those that wrote some of these bytes, each once in a row of bytes.
  template <class Visit>
  void for_each_store(uintptr_t address, size_t bytes, Visit visit) const;

 private:
  static constexpr uintptr_t kPageBytes = 4096, kUnitBytes = 2;
  using Page = std::array<uint32_t, kPageBytes / kUnitBytes>;  // 1 + store, 0: none
  std::unordered_map<uintptr_t, Page> pages_;
};

// `coordinates` has spec.rank entries, innermost first.
void tma_store(const TensorMapSpec& spec, uint32_t source, const int* coordinates, int coordinate_count, CallSite site);

void bulk_commit_group(CallSite site);

// All but `pending_groups` of the lane's groups have come to this step.
void bulk_wait_group(int pending_groups, BulkStep step, CallSite site);

void fence_proxy_async_global(CallSite site);

// A lane exits, the cluster has ended.
void check_bulk_stores_at_exit(const Lane& lane);
void finish_bulk_stores();

// Race check of an access to global memory that may meet the bytes of a bulk store.
enum class GlobalProxy { kGeneric, kAsync };
void check_against_bulk_stores(uintptr_t address, uint32_t bytes, GlobalProxy proxy, const char* what, CallSite site);

}  // namespace ffpa::emu
