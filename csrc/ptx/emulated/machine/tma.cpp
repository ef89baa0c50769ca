#include "ptx/emulated/machine/tma.h"

#include <cstring>

#include "ptx/emulated/cluster.cuh"
#include "ptx/emulated/machine/memory_ops.h"
#include "ptx/emulated/machine/shared_memory.h"
#include "ptx/emulated/tma.cuh"

namespace ffpa::emu {
namespace {

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

// Writes a row of a box to shared memory, with zeros for what lies outside the tensor.
void write_row(const SharedRange& box, const TensorMapSpec& spec, const BoxRow& row) {
  for (uint32_t i = 0; i < spec.box[0]; ++i) {
    const uint32_t offset = row.offset + i * kBoxElementBytes;
    const uint32_t address = swizzled_address((box.address & kOffsetMask) + offset, spec.swizzle);
    uint8_t* target = box.block.smem.data() + (address - kSmemBase);
    if (i >= row.first && i < row.end) {
      const uintptr_t source = row.inside + (i - row.first) * kBoxElementBytes;
      std::memcpy(target, reinterpret_cast<void*>(source), kBoxElementBytes);
    } else {
      std::memset(target, 0, kBoxElementBytes);
    }
  }
}

// Makes a copy complete now; returns this moment of the TMA unit.
uint32_t land(const SharedRange& target, uint32_t barrier, const VectorClock& issued_at) {
  const uint32_t now = ++machine->async_time;
  note_landed(target, now);
  complete_bytes(target.block, barrier, target.bytes, issued_at, now);
  return now;
}

}  // namespace

// The swizzle changes the number of a chunk of 16 bytes by that of the 128 bytes which it lies in.
uint32_t swizzled_address(uint32_t address, Swizzle swizzle) {
  const uint32_t chunks = swizzle == Swizzle::kNone ? 0 : swizzle_bytes(swizzle) - 16;
  return address ^ (address >> 3 & chunks);
}

void check_tensor_copy(const TensorMapSpec& spec, const std::vector<int>& coordinates, CallSite site) {
  require_sm90({"cp.async.bulk.tensor", site});
  if (spec.rank != int(coordinates.size())) {
    fail("tma", site, "%zu coordinates for a tensor map of rank %d", coordinates.size(), spec.rank);
  }
  if (const char* problem = problem_with(spec)) fail("tma", site, "%s", problem);
}

int64_t check_box(const TensorMapSpec& spec, const std::vector<int>& coordinates, Access access,
                  const Instruction& instruction, GlobalProxy proxy) {
  int64_t bytes = 0;
  for_each_box_row(spec, coordinates, [&](const BoxRow& row) {
    if (!row.inside_bytes()) return;
    bytes += row.inside_bytes();
    check_global(reinterpret_cast<void*>(row.inside), row.inside_bytes(), kBoxElementBytes, access, instruction, proxy);
  });
  return bytes;
}

void tma_load(uint32_t destination, const TensorMapSpec& spec, uint32_t barrier, const std::vector<int>& coordinates,
              uint16_t block_mask, CallSite site) {
  constexpr uint32_t kDestinationAlignment = 128;
  check_tensor_copy(spec, coordinates, site);
  find_mbarrier(barrier, {"cp.async.bulk.tensor", site});
  const int64_t bytes_read = check_box(spec, coordinates, Access::kReadOnly, {"TMA load", site}, GlobalProxy::kAsync);

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

  machine->async_work.push_back([=, issued_at = current->warp->clock] {
    for (const SharedRange& target : targets) {
      for_each_box_row(spec, coordinates, [&](const BoxRow& row) { write_row(target, spec, row); });
      land(target, barrier, issued_at);
    }
  });
}

}  // namespace ffpa::emu

namespace ffpa::ptx {
using namespace emu;

LaunchStatus encode_tensor_map(TensorMap& map, const TensorMapSpec& spec) {
  map.spec = spec;
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

void fence_proxy_async() { ++current->warp->proxy_epoch; }

}  // namespace ffpa::ptx
