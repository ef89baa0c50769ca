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

void tma_store(const TensorMapSpec& spec, uint32_t source, const int* coordinates, int coordinate_count,
               CallSite site) {
  constexpr const char* kWhat = "TMA store";
  require_arch(kSm90, "cp.async.bulk.tensor", site);
  count_step(site);
  if (spec.rank != coordinate_count) {
    fail("tma", site, format("%d coordinates for a tensor map of rank %d", coordinate_count, spec.rank));
  }
  if (const char* problem = problem_with_tensor_map(spec)) fail("tma", site, problem);
  Lane& lane = *current;
  const uint32_t bytes = box_bytes(spec);
  shared_pointer(*lane.block, source, bytes, kSourceAlignment, kWhat, site);
  for_each_box_row(spec, coordinates, [&](const BoxRow& row) {
    if (!row.inside_bytes()) return;
    check_global(reinterpret_cast<void*>(row.inside), row.inside_bytes(), kBoxElementBytes, Access::kReadWrite,
                 GlobalProxy::kAsync, kWhat, site);
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
  Warp& warp = *lane.warp;
  // What the warp has done so far, fences among it, is earlier than the completion.
  if (step == BulkStep::kComplete) ++warp.clock.at[warp.cluster_id];
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

void fence_proxy_async_global(CallSite site) { require_arch(kSm90, "fence.proxy.async", site); }

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

// The end of the grid is a wait for all of them.
void finish_bulk_stores() {
  for (BulkStore& store : machine->bulk_stores) {
    if (store.step == BulkStep::kRead) write_destination(store);
  }
}

void check_against_bulk_stores(uintptr_t, uint32_t, GlobalProxy, const char*, CallSite) {}

}  // namespace ffpa::emu
