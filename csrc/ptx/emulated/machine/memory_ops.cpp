#include "ptx/emulated/machine/memory_ops.h"

#include <algorithm>
#include <cstring>

#include "ptx/emulated/machine/bank_conflicts.h"
#include "ptx/emulated/machine/scheduler.h"
#include "ptx/emulated/machine/shared_memory.h"

namespace ffpa::emu {
namespace {

void write_bytes(Block& block, PendingCopy& copy) {
  if (copy.landed) return;
  uint8_t* destination = block.smem.data() + (copy.destination - kSmemBase);
  std::memcpy(destination, copy.source, copy.source_bytes);
  std::memset(destination + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
  copy.landed = true;
}

void complete(Lane& lane, PendingCopy& copy, Completion completion) {
  write_bytes(*lane.block, copy);
  note_copy_complete(*lane.block, copy.destination, copy.bytes, *lane.warp, lane.index, copy.time, completion);
  copy.complete = true;
}

void land_groups_before(Lane& lane, uint32_t group) {
  size_t count = 0;
  while (count < lane.copies.size() && lane.copies[count].group < group) {
    complete(lane, lane.copies[count++], Completion::kAwaited);
  }
  lane.copies.erase(lane.copies.begin(), lane.copies.begin() + count);
}

}  // namespace

void check_global(const void* address, uint32_t bytes, uint32_t alignment, Access access, GlobalProxy proxy,
                  const char* what, CallSite site) {
  if (reinterpret_cast<uintptr_t>(address) % alignment) {
    fail("misaligned", site, format("%s: global address %p is not a multiple of %u", what, address, alignment));
  }
  if (bytes == 0) return;
  const char* problem = machine->global.check(address, bytes, access);
  if (!problem) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
    GlobalWriters& writers = machine->global.writers();
    const bool alone = access == Access::kReadWrite ? writers.write(begin, bytes, machine->cluster)
                                                    : writers.read(begin, bytes, machine->cluster);
    if (!alone && access != Access::kAtomic && machine->options.check_races) {
      fail("race", site, format("%s: %u bytes at %p, which another block wrote", what, bytes, address));
    }
    if (!machine->bulk_stores.empty()) check_against_bulk_stores(begin, bytes, proxy, what, site);
    return;
  }
  const bool read_only = std::strstr(problem, "read-only") != nullptr;
  char neighbour[128];
  machine->global.describe_neighbour(address, bytes, neighbour, sizeof(neighbour));
  fail(read_only ? "gmem-readonly" : "gmem-oob", site,
       format("%s: %u bytes at %p are %s%s", what, bytes, address, problem, read_only ? "" : neighbour));
}

void load_shared(void* value, uint32_t address, uint32_t bytes, CallSite site) {
  count_step(site);
  Block& block = block_of(address);
  std::memcpy(value, shared_pointer(block, address, bytes, bytes, "ld.shared", site), bytes);
  note_read(block, address, bytes, *current->warp, current->index, site);
  log_shared_access("ld.shared", address, bytes, site);
}

void store_shared(uint32_t address, const void* value, uint32_t bytes, CallSite site) {
  count_step(site);
  Block& block = block_of(address);
  uint8_t* destination = shared_pointer(block, address, bytes, bytes, "st.shared", site);
  note_write(block, address, bytes, *current->warp, current->index, site);
  log_shared_access("st.shared", address, bytes, site);
  std::memcpy(destination, value, bytes);
}

void load_global(void* value, const void* address, uint32_t bytes, CallSite site) {
  count_step(site);
  check_global(address, bytes, bytes, Access::kReadOnly, GlobalProxy::kGeneric, "ld.global", site);
  machine->report.counters.bytes_global_loaded += bytes;
  std::memcpy(value, address, bytes);
}

void store_global(void* address, const void* value, uint32_t bytes, CallSite site) {
  count_step(site);
  check_global(address, bytes, bytes, Access::kReadWrite, GlobalProxy::kGeneric, "st.global", site);
  machine->report.counters.bytes_global_stored += bytes;
  std::memcpy(address, value, bytes);
}

uint32_t add_global(void* address, uint32_t value, CallSite site) {
  count_step(site);
  check_global(address, 4, 4, Access::kAtomic, GlobalProxy::kGeneric, "atom.global", site);
  machine->report.counters.bytes_global_loaded += 4;
  machine->report.counters.bytes_global_stored += 4;
  return __atomic_fetch_add(static_cast<uint32_t*>(address), value, __ATOMIC_RELAXED);
}

void copy_async(uint32_t destination, const void* source, int bytes, int source_bytes, CallSite site) {
  count_step(site);
  Lane& lane = *current;
  uint8_t* target = shared_pointer(*lane.block, destination, bytes, bytes, "cp.async", site);
  if (source_bytes < 0 || source_bytes > bytes) {
    fail("misaligned", site, format("cp.async: a source size of %d for a copy of %d bytes", source_bytes, bytes));
  }
  check_global(source, source_bytes, bytes, Access::kReadOnly, GlobalProxy::kGeneric, "cp.async", site);
  ++machine->report.counters.async_copies;
  machine->report.counters.bytes_global_to_shared += source_bytes;
  note_write(*lane.block, destination, bytes, *lane.warp, lane.index, site, WriteKind::kAsyncIssue);
  log_shared_access("cp.async", destination, bytes, site);
  if (machine->options.poison) std::memset(target, 0xff, bytes);
  // Landing at the wait alone would hide a stage that is refilled while others still read it: with random seeds one
  // copy in four lands at once.
  const bool lands_now = machine->random_schedule() && machine->random() % 4 == 0;
  PendingCopy copy{
      destination, static_cast<const uint8_t*>(source), bytes, source_bytes, lane.open_copy_group, lane.copy_time,
      site};
  if (lands_now) write_bytes(*lane.block, copy);
  // A ring without cp.async.wait_group would collect copies forever: complete ones go when they are overwritten.
  const auto ended = [&](const PendingCopy& old) { return old.complete && old.destination == destination; };
  lane.copies.erase(std::remove_if(lane.copies.begin(), lane.copies.end(), ended), lane.copies.end());
  lane.copies.push_back(copy);
}

void commit_copies() { ++current->open_copy_group; }

void wait_for_copies(int pending_groups) {
  maybe_preempt();
  Lane& lane = *current;
  if (int(lane.open_copy_group) > pending_groups) land_groups_before(lane, lane.open_copy_group - pending_groups);
}

void wait_for_all_copies() {
  maybe_preempt();
  land_groups_before(*current, current->open_copy_group + 1);
}

void land_tracked_copies(Lane& lane, uint32_t time) {
  for (PendingCopy& copy : lane.copies) {
    if (copy.time > time) break;
    if (!copy.complete) complete(lane, copy, Completion::kTracked);
  }
}

}  // namespace ffpa::emu
