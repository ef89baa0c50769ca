#include "ptx/emulated/machine/tma.h"

#include <algorithm>
#include <cstring>

#include "ptx/emulated/machine/mbarrier.h"
#include "ptx/emulated/machine/memory_ops.h"
#include "ptx/emulated/machine/scheduler.h"
#include "ptx/emulated/machine/shared_memory.h"
#include "ptx/emulated/machine/tensor_box.h"

namespace ffpa::emu {

uint32_t swizzled_address(uint32_t address, Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::k128Bytes:
      return address ^ (address >> 3 & 0x70);
    case Swizzle::k64Bytes:
      return address ^ (address >> 3 & 0x30);
    case Swizzle::k32Bytes:
      return address ^ (address >> 3 & 0x10);
    case Swizzle::kNone:
      break;
  }
  return address;
}

const char* problem_with_tensor_map(const TensorMapSpec& spec) {
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

void tma_load(uint32_t destination, const TensorMapSpec& spec, uint32_t barrier, const int* coordinates,
              int coordinate_count, uint16_t block_mask, CallSite site) {
  constexpr uint32_t kDestinationAlignment = 128;
  require_arch(kSm90, "cp.async.bulk.tensor", site);
  if (spec.rank != coordinate_count) {
    fail("tma", site, format("%d coordinates for a tensor map of rank %d", coordinate_count, spec.rank));
  }
  if (const char* problem = problem_with_tensor_map(spec)) fail("tma", site, problem);
  if (destination % kDestinationAlignment) {
    fail("misaligned", site, format("TMA: shared address 0x%x is not a multiple of 128", destination));
  }
  require_mbarrier(barrier, "cp.async.bulk.tensor", site);

  const uint32_t bytes = box_bytes(spec);
  uint64_t bytes_read = 0;
  for_each_box_row(spec, coordinates, [&](const BoxRow& row) {
    if (!row.inside_bytes()) return;
    bytes_read += row.inside_bytes();
    check_global(reinterpret_cast<void*>(row.inside), row.inside_bytes(), kBoxElementBytes, Access::kReadOnly,
                 GlobalProxy::kAsync, "TMA load", site);
  });

  Warp& warp = *current->warp;
  std::vector<Block*> targets;
  for (size_t rank = 0; rank < machine->blocks.size(); ++rank) {
    if (block_mask >> rank & 1) targets.push_back(machine->blocks[rank].get());
  }
  if (block_mask == kOwnBlock) targets.push_back(current->block);
  for (Block* block : targets) {
    uint8_t* start = shared_pointer(*block, destination & kOffsetMask, bytes, 16, "TMA", site);
    note_write(*block, destination, bytes, warp, current->index, site, WriteKind::kAsyncIssue);
    if (machine->options.poison) std::memset(start, 0xff, bytes);
  }
  ++machine->report.counters.tma_loads;
  machine->report.counters.bytes_global_to_shared += int64_t(bytes_read) * int64_t(targets.size());

  std::vector<int> position(coordinates, coordinates + spec.rank);
  const VectorClock issued_at = warp.clock;
  machine->async_work.push_back([=] {
    for (Block* block : targets) {
      for_each_box_row(spec, position.data(), [&](const BoxRow& row) {
        for (uint32_t i = 0; i < spec.box[0]; ++i) {
          const uint32_t offset = row.offset + i * kBoxElementBytes;
          const uint32_t address = swizzled_address((destination & kOffsetMask) + offset, spec.swizzle);
          uint8_t* target = block->smem.data() + (address - kSmemBase);
          if (i >= row.first && i < row.end) {
            std::memcpy(target, reinterpret_cast<void*>(row.inside + (i - row.first) * kBoxElementBytes),
                        kBoxElementBytes);
          } else {
            std::memset(target, 0, kBoxElementBytes);
          }
        }
      });
      const uint32_t now = ++machine->async_clock.at[kAsyncAgent];
      note_landed(*block, destination, bytes, kAsyncAgent, kWholeWarp, now, 0);
      mbarrier_complete_bytes(*block, barrier, bytes, issued_at, now);
    }
  });
}

// The source is read when the copy lands, which is as late as can be.
void copy_to_block(uint32_t destination, uint32_t source, uint32_t bytes, uint32_t barrier, uint32_t rank,
                   CallSite site) {
  constexpr const char* kWhat = "copy to another block";
  require_arch(kSm90, "cp.async.bulk", site);
  count_step(site);
  const uint32_t remote_barrier = remote_address(barrier, rank, site);
  require_mbarrier(remote_barrier, kWhat, site);
  Warp& warp = *current->warp;
  Block& from = *current->block;
  Block& to = *machine->blocks[rank];
  if (bytes % 16) fail("misaligned", site, format("%s: %u bytes are no multiple of 16", kWhat, bytes));
  uint8_t* target = shared_pointer(to, destination, bytes, 16, kWhat, site);
  const uint8_t* bytes_of_source = shared_pointer(from, source, bytes, 16, kWhat, site);
  const int lane = current->index;
  note_bulk_read_begin(from, source, bytes, warp, lane, site);
  note_write(to, destination, bytes, warp, lane, site, WriteKind::kAsyncIssue);
  if (machine->options.poison) std::memset(target, 0xff, bytes);
  const VectorClock issued_at = warp.clock;
  machine->async_work.push_back([=, &from, &to] {
    if (has_exited(to))
      report_error("cluster", "copy" + to_string(site), site, "a copy lands in a block that has exited");
    std::memcpy(target, bytes_of_source, bytes);
    const uint32_t now = ++machine->async_clock.at[kAsyncAgent];
    note_bulk_read_landed(from, source, bytes, now);
    note_landed(to, destination, bytes, kAsyncAgent, kWholeWarp, now, 0);
    mbarrier_complete_bytes(to, barrier, bytes, issued_at, now);
  });
}

// One lane's fence counts for its warp: the race check knows warps, not lanes.
void fence_proxy_async() { ++current->warp->proxy_epoch; }

}  // namespace ffpa::emu
