#include "ptx/emulated/machine/bulk_store.h"

#include <cstring>

#include "ptx/emulated/machine/memory_ops.h"
#include "ptx/emulated/machine/shared_memory.h"
#include "ptx/emulated/machine/tma.h"

namespace ffpa::emu {
namespace {

SharedRange source_of(const BulkStore& store) { return {*store.lane->block, store.source, box_bytes(store.spec)}; }

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
  const Warp& warp = *lane.warp;
  if (store.step == BulkStep::kIssued) {
    read_source(store);
    note_bulk_read_end(source_of(store), lane, store.site);
  }
  if (step == BulkStep::kComplete) {
    write_destination(store);
    store.complete_at = warp.clock.at[warp.cluster_id];
    store.complete_in_sync_epoch = warp.sync_epoch;
  }
  store.step = step;
}

}  // namespace

void tma_store(const TensorMapSpec& spec, uint32_t source, const std::vector<int>& coordinates, CallSite site) {
  constexpr uint32_t kSourceAlignment = 128;
  const Instruction instruction{"TMA store", site};
  check_tensor_copy(spec, coordinates, site);
  count_step(site);
  // Both of these are illegal instructions for stores, as seen on an H200; loads may do both.
  if (std::any_of(coordinates.begin(), coordinates.end(), [](int c) { return c < 0; })) {
    fail("tma", site, "a store to a negative coordinate");
  }
  if (coordinates[0] * kBoxElementBytes % 16 != 0) {
    fail("tma", site, "a store from column %d on, which is not a multiple of 16 bytes", coordinates[0]);
  }
  Lane& lane = *current;
  shared_pointer({*lane.block, source, box_bytes(spec)}, kSourceAlignment, instruction);
  machine->report.counters.bytes_global_stored +=
      check_box(spec, coordinates, Access::kReadWrite, instruction, GlobalProxy::kGeneric);

  const uint32_t id = uint32_t(machine->bulk_stores.size());
  machine->bulk_stores.push_back({&lane, spec, coordinates, source & kOffsetMask, lane.open_store_group, site});
  BulkStore& store = machine->bulk_stores.back();
  lane.pending_stores.push_back(id);
  note_bulk_read_begin(source_of(store), site);
  // Reading at the wait alone would hide a source that is not ready at the issue: with random seeds one store in four
  // reads at once.
  if (machine->by_chance(4)) read_source(store);
  for_each_box_row(spec, coordinates, [&](const BoxRow& row) {
    machine->bulk_footprint.for_each(row.inside, row.inside_bytes(), true, [&](uint32_t& mark) { mark = id + 1; });
    std::memset(reinterpret_cast<void*>(row.inside), 0xff, row.inside_bytes());
  });
}

void bulk_wait(int pending_groups, BulkStep step, CallSite site) {
  require_sm90({"cp.async.bulk.wait_group", site});
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

void check_bulk_stores_at_exit(const Lane& lane) {
  for (const uint32_t id : lane.pending_stores) {
    const BulkStore& store = machine->bulk_stores[id];
    if (store.step != BulkStep::kIssued) continue;
    const bool committed = store.group < lane.open_store_group;
    report_error("exit", store.site,
                 "a thread exits while its TMA store issued at %s may still read shared memory (%s)",
                 to_string(store.site).c_str(), committed ? "no wait for its group" : "it is in no group");
  }
}

// Writes the stores that have read their source: the end of the grid completes them.
void finish_bulk_stores() {
  for (BulkStore& store : machine->bulk_stores) {
    if (store.step == BulkStep::kRead) write_destination(store);
  }
}

void check_against_bulk_stores(uintptr_t address, uint32_t bytes, GlobalProxy proxy, const Instruction& instruction) {
  if (!machine->options.check_races) return;
  uint32_t last = 0;
  machine->bulk_footprint.for_each(address, bytes, false, [&](uint32_t mark) {
    if (mark == 0 || mark == last) return;
    last = mark;
    const BulkStore& store = machine->bulk_stores[mark - 1];
    const char* missing = what_is_missing(store, *current, proxy);
    if (!missing) return;
    fail("race", instruction.site,
         "%s: of the %u bytes at %p some are those of the TMA store issued at %s by thread %d (%s)", instruction.name,
         bytes, reinterpret_cast<void*>(address), to_string(store.site).c_str(), store.lane->thread, missing);
  });
}

}  // namespace ffpa::emu

namespace ffpa::ptx {
using namespace emu;

void bulk_commit_group(CallSite site) {
  require_sm90({"cp.async.bulk.commit_group", site});
  ++current->open_store_group;
}

void fence_proxy_async_global(CallSite site) {
  require_sm90({"fence.proxy.async", site});
  const Warp& warp = *current->warp;
  const int self = warp.cluster_id;
  for (BulkStore& store : machine->bulk_stores) {
    if (store.step != BulkStep::kComplete || !is_known(store, warp)) continue;
    const bool again = std::any_of(store.fences.begin(), store.fences.end(),
                                   [&](const BulkStore::Fence& fence) { return fence.warp == self; });
    if (!again) store.fences.push_back({self, warp.clock.at[self]});
  }
}

}  // namespace ffpa::ptx
