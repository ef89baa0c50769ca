#include <cstring>

#include "ptx/emulated/instructions.cuh"

namespace ffpa::emu {
namespace {

constexpr uint32_t kCopyBytes = 16;

void write_bytes(Block& block, PendingCopy& copy) {
  if (copy.landed) return;
  uint8_t* destination = block.smem.data() + (copy.destination - kSmemBase);
  std::memset(destination, 0, kCopyBytes);
  if (copy.source) std::memcpy(destination, copy.source, kCopyBytes);
  copy.landed = true;
}

void complete(Lane& lane, PendingCopy& copy, Completion completion) {
  write_bytes(*lane.block, copy);
  note_copy_complete({*lane.block, copy.destination, kCopyBytes}, lane, copy.time, completion);
  copy.complete = true;
}

void land_groups_before(Lane& lane, uint32_t group) {
  size_t count = 0;
  while (count < lane.copies.size() && lane.copies[count].group < group) {
    complete(lane, lane.copies[count++], Completion::kAwaited);
  }
  lane.copies.erase(lane.copies.begin(), lane.copies.begin() + count);
}

// Checks and records a load or a store, and returns where the bytes lie.
uint8_t* access_shared(const SharedRange& range, bool writes, CallSite site) {
  const Instruction instruction{writes ? "st.shared" : "ld.shared", site};
  count_step(site);
  uint8_t* place = shared_pointer(range, range.bytes, instruction);
  if (writes) {
    note_write(range, *current, site);
  } else {
    note_read(range, *current, site);
  }
  log_shared_access(instruction, range.address, int(range.bytes));
  return place;
}

template <class Value>
void load_shared(Value& value, uint32_t address, CallSite site) {
  std::memcpy(&value, access_shared({block_of(address), address, sizeof(value)}, false, site), sizeof(value));
}

template <class Value>
void store_shared(uint32_t address, const Value& value, CallSite site) {
  std::memcpy(access_shared({block_of(address), address, sizeof(value)}, true, site), &value, sizeof(value));
}

template <class Value>
void load_global(Value& value, const void* address, CallSite site) {
  count_step(site);
  check_global(address, sizeof(value), sizeof(value), Access::kReadOnly, {"ld.global", site});
  machine->report.counters.bytes_global_loaded += sizeof(value);
  std::memcpy(&value, address, sizeof(value));
}

template <class Value>
void store_global(void* address, const Value& value, CallSite site) {
  count_step(site);
  check_global(address, sizeof(value), sizeof(value), Access::kReadWrite, {"st.global", site});
  machine->report.counters.bytes_global_stored += sizeof(value);
  std::memcpy(address, &value, sizeof(value));
}

template <class Value>
Value global_value(const void* address, CallSite site) {
  Value value;
  load_global(value, address, site);
  return value;
}

}  // namespace

void land_tracked_copies(Lane& lane, uint32_t time) {
  for (PendingCopy& copy : lane.copies) {
    if (copy.time > time) break;
    if (!copy.complete) complete(lane, copy, Completion::kTracked);
  }
}

void wait_for_copies(int pending_groups) {
  maybe_preempt();
  Lane& lane = *current;
  if (int(lane.open_copy_group) > pending_groups) land_groups_before(lane, lane.open_copy_group - pending_groups);
}

}  // namespace ffpa::emu

namespace ffpa::ptx {
using namespace emu;

uint32_t ld_shared_4(uint32_t address, CallSite site) {
  uint32_t value;
  load_shared(value, address, site);
  return value;
}
void ld_shared_8(uint32_t (&value)[2], uint32_t address, CallSite site) { load_shared(value, address, site); }
void ld_shared_16(uint32_t (&value)[4], uint32_t address, CallSite site) { load_shared(value, address, site); }

void st_shared_4(uint32_t address, uint32_t value, CallSite site) { store_shared(address, value, site); }
void st_shared_8(uint32_t address, const uint32_t (&value)[2], CallSite site) { store_shared(address, value, site); }
void st_shared_16(uint32_t address, const uint32_t (&value)[4], CallSite site) { store_shared(address, value, site); }

uint8_t ld_global_1(const void* address, CallSite site) { return global_value<uint8_t>(address, site); }
uint16_t ld_global_2(const void* address, CallSite site) { return global_value<uint16_t>(address, site); }
uint32_t ld_global_4(const void* address, CallSite site) { return global_value<uint32_t>(address, site); }
void ld_global_8(uint32_t (&value)[2], const void* address, CallSite site) { load_global(value, address, site); }
void ld_global_16(uint32_t (&value)[4], const void* address, CallSite site) { load_global(value, address, site); }

void st_global_2(void* address, uint16_t value, CallSite site) { store_global(address, value, site); }
void st_global_4(void* address, uint32_t value, CallSite site) { store_global(address, value, site); }
void st_global_8(void* address, const uint32_t (&value)[2], CallSite site) { store_global(address, value, site); }
void st_global_16(void* address, const uint32_t (&value)[4], CallSite site) { store_global(address, value, site); }

void cp_async_16_or_zero(bool exists, uint32_t destination_smem, const void* source_gmem, CallSite site) {
  const Instruction instruction{"cp.async", site};
  count_step(site);
  Lane& lane = *current;
  const SharedRange target{*lane.block, destination_smem, kCopyBytes};
  shared_pointer(target, kCopyBytes, instruction);
  const uint32_t bytes_read = exists ? kCopyBytes : 0;
  check_global(source_gmem, bytes_read, kCopyBytes, Access::kReadOnly, instruction);
  machine->report.counters.bytes_global_to_shared += bytes_read;
  begin_async_write(target, site);
  log_shared_access(instruction, destination_smem, kCopyBytes);
  PendingCopy copy{destination_smem, exists ? static_cast<const uint8_t*>(source_gmem) : nullptr, lane.open_copy_group,
                   lane.copy_time, site};
  // Landing at the wait alone would hide a stage that is refilled while others still read it: with random seeds one
  // copy in four lands at once.
  if (machine->by_chance(4)) write_bytes(*lane.block, copy);
  // A ring without cp.async.wait_group would collect copies forever: complete ones go when they are overwritten.
  const auto ended = [&](const PendingCopy& old) { return old.complete && old.destination == destination_smem; };
  lane.copies.erase(std::remove_if(lane.copies.begin(), lane.copies.end(), ended), lane.copies.end());
  lane.copies.push_back(copy);
}

}  // namespace ffpa::ptx
