#include "ptx/emulated/machine/tma.h"

#include <algorithm>
#include <cstring>

#include "ptx/emulated/instructions.cuh"

namespace ffpa::emu {
namespace {

// Returns the parts of a box's rows that lie inside the tensor.
std::vector<BoxRow> rows_inside(const TensorMapSpec& spec, const std::vector<int>& coordinates) {
  const int64_t start = coordinates[0];
  const int64_t first = std::clamp<int64_t>(-start, 0, spec.box[0]);
  const int64_t end = std::clamp<int64_t>(int64_t(spec.size[0]) - start, first, spec.box[0]);
  const uint32_t row_bytes = spec.box[0] * kBoxElementBytes;
  std::vector<BoxRow> rows;
  for (uint32_t offset = 0; offset < box_bytes(spec) && first < end; offset += row_bytes) {
    bool inside = true;
    uintptr_t address = reinterpret_cast<uintptr_t>(spec.base) + (start + first) * kBoxElementBytes;
    uint32_t number = offset / row_bytes;
    for (int i = 1; i < spec.rank; ++i) {
      const int64_t position = int64_t(coordinates[i]) + number % spec.box[i];
      number /= spec.box[i];
      inside &= position >= 0 && position < int64_t(spec.size[i]);
      address += position * int64_t(spec.stride_bytes[i]);
    }
    if (inside) {
      rows.push_back({uint32_t(offset + first * kBoxElementBytes), reinterpret_cast<uint8_t*>(address),
                      uint32_t(end - first) * kBoxElementBytes});
    }
  }
  return rows;
}

const char* problem_with(const TensorMapSpec& spec) {
  if (spec.rank < 1 || spec.rank > kMaxTensorRank) return "tensor map: the rank must be 1 to 5";
  if (reinterpret_cast<uintptr_t>(spec.base) % 16) return "tensor map: the base is not 16-byte aligned";
  for (int i = 0; i < spec.rank; ++i) {
    if (spec.size[i] == 0 || spec.size[i] > uint64_t(1) << 32) return "tensor map: a size must be 1 to 2^32";
    if (spec.box[i] == 0 || spec.box[i] > 256) return "tensor map: a box extent must be 1 to 256";
    if (i > 0 && spec.stride_bytes[i] % 16) return "tensor map: a stride is not a multiple of 16 bytes";
  }
  const uint32_t inner_bytes = spec.box[0] * kBoxElementBytes;
  if (inner_bytes % 16) return "tensor map: the innermost extent of the box is not a multiple of 16 bytes";
  if (spec.swizzle != Swizzle::kNone && inner_bytes > uint32_t(swizzle_bytes(spec.swizzle))) {
    return "tensor map: the innermost extent of the box exceeds the swizzle";
  }
  return nullptr;
}

// Returns the place of a box's 16 bytes at `offset`, which no swizzle takes apart.
constexpr uint32_t kChunkBytes = 16;
uint8_t* chunk_of(const SharedRange& box, uint32_t offset, Swizzle swizzle) {
  const uint32_t address = swizzled_address((box.address & kOffsetMask) + offset, swizzle);
  return box.block.smem.data() + (address - kSmemBase);
}

// Records that a load reads these rows at the TMA unit's next moment.
void note_landed_rows(const std::vector<BoxRow>& rows, GlobalAccess access, const VectorClock& issued_at) {
  GlobalMemory& global = *machine->global;
  const auto address = [](const BoxRow& row) { return reinterpret_cast<uintptr_t>(row.address); };
  const bool may_change = !rows.empty() && global.check(address(rows[0]), rows[0].bytes) == Verdict::kReadWrite;
  if (!may_change || !machine->options.check_races) return;
  access.time = machine->async_time + 1;
  for (const BoxRow& row : rows) {
    std::string conflict;
    global.note_access(address(row), row.bytes, access, issued_at, Proxy::kAsync, conflict);
    if (conflict.empty()) continue;
    report_error("race", access.instruction.site, "%s: it lands from %p, which %s", access.instruction.name,
                 static_cast<void*>(row.address), conflict.c_str());
    return;
  }
}

// Makes a copy complete now; returns this moment of the TMA unit.
uint32_t land(const SharedRange& target, uint32_t barrier, const VectorClock& issued_at) {
  const uint32_t now = ++machine->async_time;
  note_landed(target, now);
  complete_bytes(target.block, barrier, target.bytes, issued_at, now);
  return now;
}

// Fails unless the GPU has TMA, the coordinates fit the map, and cuTensorMapEncodeTiled would accept the description.
void check_tensor_copy(const TensorMapSpec& spec, const std::vector<int>& coordinates, CallSite site) {
  require_sm90({"cp.async.bulk.tensor", site});
  if (spec.rank != int(coordinates.size())) {
    fail("tma", site, "%zu coordinates for a tensor map of rank %d", coordinates.size(), spec.rank);
  }
  if (const char* problem = problem_with(spec)) fail("tma", site, "%s", problem);
}

// Fails unless the rows may be accessed; returns how many bytes they have, and adds the marks of the access.
int64_t check_rows(const std::vector<BoxRow>& rows, Access access, const Instruction& instruction, Proxy proxy,
                   std::vector<uint32_t>& marks) {
  int64_t bytes = 0;
  for (const BoxRow& row : rows) {
    const uint32_t mark = check_global(row.address, row.bytes, kBoxElementBytes, access, instruction, proxy);
    if (marks.empty() || marks.back() != mark) marks.push_back(mark);
    bytes += row.bytes;
  }
  return bytes;
}

SharedRange source_of(const BulkStore& store) { return {*store.lane->block, store.source, box_bytes(store.spec)}; }

void read_source(BulkStore& store) {
  if (!store.bytes.empty()) return;
  store.bytes.resize(box_bytes(store.spec));
  for (uint32_t offset = 0; offset < store.bytes.size(); offset += kChunkBytes) {
    std::memcpy(&store.bytes[offset], chunk_of(source_of(store), offset, store.spec.swizzle), kChunkBytes);
  }
}

void write_destination(BulkStore& store) {
  for (size_t i = 0; i < store.before.size(); i += sizeof(float)) {
    float sum, term;
    std::memcpy(&sum, &store.before[i], sizeof(sum));
    std::memcpy(&term, &store.bytes[i], sizeof(term));
    sum += term;
    std::memcpy(&store.bytes[i], &sum, sizeof(sum));
  }
  for (const BoxRow& row : store.rows) std::memcpy(row.address, &store.bytes[row.offset], row.bytes);
  store.bytes = store.before = {};
}

// Tells whether the warp has learned of the store's completion.
bool is_known(const BulkStore& store, const Warp& warp) {
  const Warp& owner = *store.lane->warp;
  return &owner == &warp || store.complete_at <= warp.clock.at[owner.cluster_id];
}

// Says why the lane may not touch what the store wrote, or returns nullptr where it may.
const char* what_is_missing(const BulkStore& store, const Lane& lane, Proxy proxy) {
  const Warp& warp = *lane.warp;
  if (store.step != BulkStep::kComplete) return "it is not complete: bulk_wait_group by that thread missing";
  if (!is_known(store, warp)) return "no barrier after its bulk_wait_group";
  if (store.lane == &lane) return nullptr;
  if (store.lane->warp == &warp && store.complete_in_sync_epoch == warp.sync_epoch) {
    return "no __syncwarp after its bulk_wait_group";
  }
  const bool fenced = std::any_of(store.fences.begin(), store.fences.end(), [&](const auto& fence) {
    return fence.first == warp.cluster_id || fence.second <= warp.clock.at[fence.first];
  });
  return proxy == Proxy::kAsync && !fenced ? "fence_proxy_async_global missing" : nullptr;
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
    machine->global->set_time(store.marks, store.complete_at);
  }
  store.step = step;
}

// Queues a store of these rows, or an addition to them. Reading at the wait alone would hide a source that is not ready
// at the issue: with random seeds one store in four reads at once. The destination is poison until it is written.
void issue(BulkStore store) {
  Lane& lane = *store.lane;
  const uint32_t id = uint32_t(machine->bulk_stores.size());
  lane.pending_stores.push_back(id);
  note_bulk_read_begin(source_of(store), store.site);
  if (machine->by_chance(4)) read_source(store);
  for (const BoxRow& row : store.rows) {
    machine->bulk_footprint.for_each(reinterpret_cast<uintptr_t>(row.address), row.bytes, true,
                                     [&](uint32_t& mark) { mark = id + 1; });
    std::memset(row.address, 0xff, row.bytes);
  }
  machine->bulk_stores.push_back(std::move(store));
}

}  // namespace

// The swizzle changes the number of a chunk of 16 bytes by that of the 128 bytes which it lies in.
uint32_t swizzled_address(uint32_t address, Swizzle swizzle) {
  const uint32_t chunks = swizzle == Swizzle::kNone ? 0 : swizzle_bytes(swizzle) - 16;
  return address ^ (address >> 3 & chunks);
}

void tma_load(uint32_t destination, const TensorMapSpec& spec, uint32_t barrier, const std::vector<int>& coordinates,
              uint16_t block_mask, CallSite site) {
  constexpr uint32_t kDestinationAlignment = 128;
  check_tensor_copy(spec, coordinates, site);
  find_mbarrier(barrier, {"cp.async.bulk.tensor", site});
  const std::vector<BoxRow> rows = rows_inside(spec, coordinates);
  const Instruction instruction{"TMA load", site};
  std::vector<uint32_t> marks;
  const int64_t bytes_read = check_rows(rows, Access::kBulkRead, instruction, Proxy::kAsync, marks);

  std::vector<SharedRange> targets;
  for (size_t rank = 0; rank < machine->blocks.size(); ++rank) {
    Block& block = *machine->blocks[rank];
    const bool chosen = block_mask == kOwnBlock ? &block == current->block : block_mask >> rank & 1;
    if (chosen) targets.push_back({block, destination & kOffsetMask, box_bytes(spec)});
  }
  for (const SharedRange& target : targets) {
    shared_pointer(target, kDestinationAlignment, {"TMA", site});
    begin_async_write(target, site);
  }
  machine->report.counters.bytes_global_to_shared += bytes_read * int64_t(targets.size());

  const GlobalAccess access{Access::kReadOnly, machine->cluster, kAsyncAgent, 0, 0, current->block->index, instruction};
  machine->async_work.push_back([=, issued_at = current->warp->clock] {
    note_landed_rows(rows, access, issued_at);
    std::vector<uint8_t> bytes(box_bytes(spec));  // zero outside the tensor
    for (const BoxRow& row : rows) std::memcpy(&bytes[row.offset], row.address, row.bytes);
    for (const SharedRange& target : targets) {
      for (uint32_t offset = 0; offset < bytes.size(); offset += kChunkBytes) {
        std::memcpy(chunk_of(target, offset, spec.swizzle), &bytes[offset], kChunkBytes);
      }
      land(target, barrier, issued_at);
    }
  });
}

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
  const std::vector<BoxRow> rows = rows_inside(spec, coordinates);
  std::vector<uint32_t> marks;
  machine->report.counters.bytes_global_stored +=
      check_rows(rows, Access::kBulkWrite, instruction, Proxy::kGeneric, marks);
  issue({&lane, spec, rows, source & kOffsetMask, lane.open_store_group, site, marks, instruction.name});
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
    report_error("exit", store.site, "a thread exits while its %s issued at %s may still read shared memory (%s)",
                 store.name, to_string(store.site).c_str(), committed ? "no wait for its group" : "it is in no group");
  }
}

// Writes the stores that have read their source: the end of the grid completes them.
void finish_bulk_stores() {
  for (BulkStore& store : machine->bulk_stores) {
    if (store.step == BulkStep::kRead) write_destination(store);
  }
}

void check_against_bulk_stores(uintptr_t address, uint32_t bytes, Proxy proxy, const Instruction& instruction) {
  if (!machine->options.check_races) return;
  uint32_t last = 0;
  machine->bulk_footprint.for_each(address, bytes, false, [&](uint32_t mark) {
    if (mark == 0 || mark == last) return;
    last = mark;
    const BulkStore& store = machine->bulk_stores[mark - 1];
    const char* missing = what_is_missing(store, *current, proxy);
    if (!missing) return;
    fail("race", instruction.site, "%s: of the %u bytes at %p some are those of the %s issued at %s by thread %d (%s)",
         instruction.name, bytes, reinterpret_cast<void*>(address), store.name, to_string(store.site).c_str(),
         store.lane->thread, missing);
  });
}

}  // namespace ffpa::emu

namespace ffpa::ptx {
using namespace emu;

LaunchStatus encode_tensor_map(TensorMap& map, const TensorMapSpec& spec) {
  map = spec;
  const char* problem = problem_with(spec);
  return problem ? LaunchStatus{1, problem} : LaunchStatus{};
}

void copy_to_block(uint32_t destination_smem, uint32_t source_smem, uint32_t bytes, uint32_t barrier_smem,
                   uint32_t rank, CallSite site) {
  const Instruction instruction{"copy to another block", site};
  require_sm90({"cp.async.bulk", site});
  count_step(site);
  find_mbarrier(remote_address(barrier_smem, rank, site), instruction);
  const SharedRange to{*machine->blocks[rank], destination_smem, bytes};
  const SharedRange from{*current->block, source_smem, bytes};
  if (bytes % 16) fail("misaligned", site, "%s: %u bytes are no multiple of 16", instruction.name, bytes);
  uint8_t* target = shared_pointer(to, 16, instruction);
  const uint8_t* source = shared_pointer(from, 16, instruction);
  note_bulk_read_begin(from, site);
  begin_async_write(to, site);
  machine->async_work.push_back([=, issued_at = current->warp->clock] {
    if (has_exited(to.block)) {
      report_error("cluster", site, "a copy lands in a block that has exited");
    }
    std::memcpy(target, source, bytes);
    note_bulk_read_landed(from, land(to, barrier_smem, issued_at));
  });
}

// The sums are made at the full wait, or when the blocks end, from what was there at the issue: nothing that is ordered
// comes between.
void bulk_reduce_add_f32(void* destination, uint32_t source_smem, uint32_t bytes, CallSite site) {
  const Instruction instruction{"cp.reduce.async.bulk", site};
  require_sm90(instruction);
  count_step(site);
  Lane& lane = *current;
  if (bytes == 0 || bytes % 16) fail("misaligned", site, "%s: %u bytes are no multiple of 16", instruction.name, bytes);
  shared_pointer({*lane.block, source_smem, bytes}, 16, instruction);
  const uint32_t mark = check_global(destination, bytes, 16, Access::kBulkWrite, instruction, Proxy::kAsync);
  machine->report.counters.bytes_global_stored += bytes;
  TensorMapSpec row;
  row.rank = 1;
  row.box[0] = bytes / kBoxElementBytes;
  auto* const target = static_cast<uint8_t*>(destination);
  BulkStore addition{&lane, row,    {{0, target, bytes}}, source_smem & kOffsetMask, lane.open_store_group,
                     site,  {mark}, instruction.name};
  addition.before.assign(target, target + bytes);
  issue(std::move(addition));
}

void bulk_commit_group(CallSite site) {
  require_sm90({"cp.async.bulk.commit_group", site});
  ++current->open_store_group;
}

void fence_proxy_async_global(CallSite site) {
  require_sm90({"fence.proxy.async", site});
  Warp& warp = *current->warp;
  for (BulkStore& store : machine->bulk_stores) {
    if (store.step != BulkStep::kComplete || !is_known(store, warp)) continue;
    store.fences.emplace(warp.cluster_id, warp.clock.at[warp.cluster_id]);
  }
  FarClock::join(warp.clock.far.fenced, publish().known);
}

}  // namespace ffpa::ptx
