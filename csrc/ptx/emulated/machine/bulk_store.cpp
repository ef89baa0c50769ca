#include "ptx/emulated/machine/bulk_store.h"

#include <algorithm>
#include <cstring>

#include "ptx/emulated/machine/memory_ops.h"
#include "ptx/emulated/machine/scheduler.h"
#include "ptx/emulated/machine/shared_memory.h"
#include "ptx/emulated/machine/tensor_box.h"
#include "ptx/emulated/machine/tma.h"

namespace ffpa::emu {
namespace {

constexpr uint32_t kSourceAlignment = 128;

void read_source(BulkStore& store) {
  if (!store.bytes.empty()) return;
  const Block& block = *store.lane->block;
  store.bytes.resize(box_bytes(store.spec));
  for (uint32_t offset = 0; offset < store.bytes.size(); offset += kBoxElementBytes) {
    const uint32_t address = swizzled_address(store.source + offset, store.spec.swizzle);
    std::memcpy(&store.bytes[offset], block.smem.data() + (address - kSmemBase), kBoxElementBytes);
  }
}

void write_destination(BulkStore& store) {
  for_each_box_row(store.spec, store.coordinates, [&](const BoxRow& row) {
    std::memcpy(reinterpret_cast<void*>(row.inside), &store.bytes[row.offset] + row.first * kBoxElementBytes,
                row.inside_bytes());
  });
  store.bytes = {};
}

// Tells whether the warp has learned of the store's completion.
bool is_known(const BulkStore& store, const Warp& warp) {
  const Warp& owner = *store.lane->warp;
  return &owner == &warp || store.complete_at <= warp.clock.at[owner.cluster_id];
}

// Says why the lane may not touch what the store wrote, or returns nullptr where it may.
const char* what_is_missing(const BulkStore& store, const Lane& lane, GlobalProxy proxy) {
  const Warp& warp = *lane.warp;
  if (store.step != BulkStep::kComplete) return "it is not complete: bulk_wait_group by that thread missing";
  if (!is_known(store, warp)) return "no barrier after its bulk_wait_group";
  if (store.lane == &lane) return nullptr;
  if (store.lane->warp == &warp && store.complete_in_sync_epoch == warp.sync_epoch) {
    return "no __syncwarp after its bulk_wait_group";
  }
  const bool fenced = std::any_of(store.fences.begin(), store.fences.end(), [&](const BulkStore::Fence& fence) {
    return fence.warp == warp.cluster_id || fence.time <= warp.clock.at[fence.warp];
  });
  return proxy == GlobalProxy::kAsync && !fenced ? "fence_proxy_async_global missing" : nullptr;
}

void advance(BulkStore& store, BulkStep step) {
  Lane& lane = *store.lane;
  Warp& warp = *lane.warp;
  if (store.step == BulkStep::kIssued) {
    read_source(store);
    note_bulk_read_end(*lane.block, store.source, box_bytes(store.spec), warp, lane.index, store.site);
  }
  if (step == BulkStep::kComplete) {
    write_destination(store);
    store.complete_at = warp.clock.at[warp.cluster_id];
    store.complete_in_sync_epoch = warp.sync_epoch;
  }
  store.step = step;
}

}  // namespace

void BulkFootprint::write(uintptr_t address, size_t bytes, uint32_t store) {
  for (uintptr_t at = address, next; at < address + bytes; at = next) {
    next = std::min((at / kPageBytes + 1) * kPageBytes, address + bytes);
    Page& page = pages_[at / kPageBytes];
    for (; at < next; at += kUnitBytes) page[at % kPageBytes / kUnitBytes] = store + 1;
  }
}

template <class Visit>
void BulkFootprint::for_each_store(uintptr_t address, size_t bytes, Visit visit) const {
  uint32_t last = 0;
  for (uintptr_t at = address, next; at < address + bytes; at = next) {
    next = std::min((at / kPageBytes + 1) * kPageBytes, address + bytes);
    const auto page = pages_.find(at / kPageBytes);
    if (page == pages_.end()) continue;
    for (; at < next; at += kUnitBytes) {
      const uint32_t store = page->second[at % kPageBytes / kUnitBytes];
      if (store != last && store != 0) visit(store - 1);
      last = store;
    }
  }
}

void tma_store(const TensorMapSpec& spec, uint32_t source, const int* coordinates, int coordinate_count,
               CallSite site) {
  constexpr const char* kWhat = "TMA store";
  require_arch(kSm90, "cp.async.bulk.tensor", site);
  count_step(site);
  if (spec.rank != coordinate_count) {
    fail("tma", site, format("%d coordinates for a tensor map of rank %d", coordinate_count, spec.rank));
  }
  if (const char* problem = problem_with_tensor_map(spec)) fail("tma", site, problem);
  // Both of these are illegal instructions for stores, as seen on an H200; loads may do both.
  if (std::any_of(coordinates, coordinates + coordinate_count, [](int c) { return c < 0; })) {
    fail("tma", site, "a store to a negative coordinate");
  }
  if (coordinates[0] * kBoxElementBytes % 16 != 0) {
    fail("tma", site, format("a store from column %d on, which is not a multiple of 16 bytes", coordinates[0]));
  }
  Lane& lane = *current;
  const uint32_t bytes = box_bytes(spec);
  shared_pointer(*lane.block, source, bytes, kSourceAlignment, kWhat, site);
  for_each_box_row(spec, coordinates, [&](const BoxRow& row) {
    if (!row.inside_bytes()) return;
    check_global(reinterpret_cast<void*>(row.inside), row.inside_bytes(), kBoxElementBytes, Access::kReadWrite,
                 GlobalProxy::kGeneric, kWhat, site);
    machine->report.counters.bytes_global_stored += row.inside_bytes();
  });
  ++machine->report.counters.tma_stores;

  const uint32_t id = uint32_t(machine->bulk_stores.size());
  BulkStore& store = machine->bulk_stores.emplace_back(&lane, spec, source & kOffsetMask, lane.open_store_group, site);
  std::copy(coordinates, coordinates + coordinate_count, store.coordinates);
  lane.pending_stores.push_back(id);
  note_bulk_read_begin(*lane.block, source, bytes, *lane.warp, lane.index, site);
  // Reading at the wait alone would hide a source that is not ready at the issue: with random seeds one store in four
  // reads at once.
  if (machine->random_schedule() && machine->random() % 4 == 0) read_source(store);
  for_each_box_row(spec, coordinates, [&](const BoxRow& row) {
    if (!row.inside_bytes()) return;
    machine->bulk_footprint.write(row.inside, row.inside_bytes(), id);
    if (machine->options.poison) std::memset(reinterpret_cast<void*>(row.inside), 0xff, row.inside_bytes());
  });
}

void bulk_commit_group(CallSite site) {
  require_arch(kSm90, "cp.async.bulk.commit_group", site);
  ++current->open_store_group;
}

void bulk_wait_group(int pending_groups, BulkStep step, CallSite site) {
  require_arch(kSm90, "cp.async.bulk.wait_group", site);
  maybe_preempt();
  Lane& lane = *current;
  for (const uint32_t id : lane.pending_stores) {
    BulkStore& store = machine->bulk_stores[id];
    if (int64_t(store.group) < int64_t(lane.open_store_group) - pending_groups && store.step < step) {
      advance(store, step);
    }
  }
  const auto complete = [](uint32_t id) { return machine->bulk_stores[id].step == BulkStep::kComplete; };
  lane.pending_stores.erase(std::remove_if(lane.pending_stores.begin(), lane.pending_stores.end(), complete),
                            lane.pending_stores.end());
}

// One lane's fence counts for its whole warp, as the fence for shared memory does.
void fence_proxy_async_global(CallSite site) {
  require_arch(kSm90, "fence.proxy.async", site);
  const Warp& warp = *current->warp;
  const int self = warp.cluster_id;
  for (BulkStore& store : machine->bulk_stores) {
    if (store.step != BulkStep::kComplete || !is_known(store, warp)) continue;
    const bool again = std::any_of(store.fences.begin(), store.fences.end(),
                                   [&](const BulkStore::Fence& fence) { return fence.warp == self; });
    if (!again) store.fences.push_back({self, warp.clock.at[self]});
  }
}

void check_bulk_stores_at_exit(const Lane& lane) {
  for (const uint32_t id : lane.pending_stores) {
    const BulkStore& store = machine->bulk_stores[id];
    if (store.step != BulkStep::kIssued) continue;
    const bool committed = store.group < lane.open_store_group;
    report_error("exit", "s" + to_string(store.site), store.site,
                 format("a thread exits while its TMA store issued at %s may still read shared memory (%s)",
                        to_string(store.site).c_str(), committed ? "no wait for its group" : "it is in no group"));
  }
}

// Writes the stores that have read their source: the end of the grid completes them.
void finish_bulk_stores() {
  for (BulkStore& store : machine->bulk_stores) {
    if (store.step == BulkStep::kRead) write_destination(store);
  }
}

void check_against_bulk_stores(uintptr_t address, uint32_t bytes, GlobalProxy proxy, const char* what, CallSite site) {
  if (!machine->options.check_races) return;
  machine->bulk_footprint.for_each_store(address, bytes, [&](uint32_t id) {
    const BulkStore& store = machine->bulk_stores[id];
    const char* missing = what_is_missing(store, *current, proxy);
    if (!missing) return;
    fail("race", site,
         format("%s: of the %u bytes at %p some are those of the TMA store issued at %s by thread %d (%s)", what, bytes,
                reinterpret_cast<void*>(address), to_string(store.site).c_str(), store.lane->thread, missing));
  });
}

}  // namespace ffpa::emu
