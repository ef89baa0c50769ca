// TMA stores: the shared memory that pending ones may still read, and the global memory that they write.
#pragma once

#include <cstdint>
#include <vector>

#include "ptx/emulated/machine/report.h"
#include "ptx/emulated/tma.cuh"

namespace ffpa::emu {

struct Lane;

// One TMA store of the cluster that runs.
struct BulkStore {
  Lane* lane;
  TensorMapSpec spec;
  std::vector<int> coordinates;
  uint32_t source;
  uint32_t group;
  CallSite site;
  BulkStep step = BulkStep::kIssued;
  std::vector<uint8_t> bytes = {};  // bytes of the box, from when they are read until they are written
  uint32_t complete_at = 0;         // time of the lane's warp
  uint32_t complete_in_sync_epoch = 0;

  // A fence.proxy.async.global by a warp that knew of the completion. A warp that knows of such a fence may load the
  // bytes through the async proxy.
  struct Fence {
    int warp;
    uint32_t time;
  };
  std::vector<Fence> fences = {};
};

// The first is called when a lane exits, the second when the cluster has ended.
void check_bulk_stores_at_exit(const Lane& lane);
void finish_bulk_stores();

// Checks an access to global memory for races with the bytes of a bulk store.
enum class GlobalProxy { kGeneric, kAsync };
void check_against_bulk_stores(uintptr_t address, uint32_t bytes, GlobalProxy proxy, const Instruction& instruction);

}  // namespace ffpa::emu
