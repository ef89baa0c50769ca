// TMA: the boxes of tensors that its copies move; stores, with the shared memory that pending ones may still read, and
// the global memory that they write.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "ptx/descriptors.h"
#include "ptx/emulated/machine/global_accesses.h"

namespace ffpa::emu {

struct Lane;

inline constexpr int kBoxElementBytes = 2;

inline uint32_t box_bytes(const TensorMapSpec& spec) {
  uint32_t bytes = kBoxElementBytes;
  for (int i = 0; i < spec.rank; ++i) bytes *= spec.box[i];
  return bytes;
}

// Returns where the swizzle puts the byte that would lie at `address`.
uint32_t swizzled_address(uint32_t address, Swizzle swizzle);

// The step that a store has reached, as far as its thread's waits guarantee.
enum class BulkStep { kIssued, kRead, kComplete };

struct BoxRow {
  uint32_t offset;  // bytes from the start of the box
  uint8_t* address;
  uint32_t bytes;
};

// This is a TMA store of the cluster that runs, or an addition by TMA.
struct BulkStore {
  Lane* lane;
  TensorMapSpec spec;
  std::vector<BoxRow> rows;  // where it writes
  uint32_t source;
  uint32_t group;
  CallSite site;
  std::vector<uint32_t> marks;  // those of its accesses to global memory
  const char* name;             // as reports call it
  BulkStep step = BulkStep::kIssued;
  std::vector<uint8_t> bytes = {};   // bytes of the box, from when they are read until they are written
  std::vector<uint8_t> before = {};  // what it adds to
  uint32_t complete_at = 0;          // time of the lane's warp
  uint32_t complete_in_sync_epoch = 0;

  // For each warp that executed fence.proxy.async.global and knew of the completion, the time when it first did. A warp
  // that knows of such a fence may load the bytes through the async proxy.
  std::map<int, uint32_t> fences = {};
};

// The first is called when a lane exits, the second when the cluster has ended.
void check_bulk_stores_at_exit(const Lane& lane);
void finish_bulk_stores();

// Checks an access to global memory for races with the bytes of a bulk store.
void check_against_bulk_stores(uintptr_t address, uint32_t bytes, Proxy proxy, const Instruction& instruction);

}  // namespace ffpa::emu
