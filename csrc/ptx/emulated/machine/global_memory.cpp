#include "ptx/emulated/machine/global_memory.h"

#include "ptx/emulated/machine/machine.h"

namespace ffpa::emu {
namespace {

std::mutex registered_mutex;
RangesByBase registered;

}  // namespace

RegisteredRange::RegisteredRange(const void* base, size_t bytes, Access access) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(base);
  std::lock_guard<std::mutex> lock(registered_mutex);
  place_ = registered.insert({begin, {begin + bytes, access}});
}

RegisteredRange::~RegisteredRange() {
  std::lock_guard<std::mutex> lock(registered_mutex);
  registered.erase(place_);
}

GlobalMemory::GlobalMemory(int os_threads) : running_(os_threads) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  for (const auto& [base, range] : registered) {
    if (range.end != base) by_base_.insert({base, range});
  }
}

Verdict GlobalMemory::check(uintptr_t address, size_t bytes) const {
  Verdict verdict = Verdict::kOutside;
  for (const auto& [base, range] : by_base_) {
    if (base > address) break;
    if (address + bytes > range.end) continue;
    if (range.access == Access::kReadWrite) return Verdict::kReadWrite;
    verdict = Verdict::kReadOnly;
  }
  return verdict;
}

std::string GlobalMemory::describe_neighbour(uintptr_t address, size_t bytes) const {
  constexpr uintptr_t kNear = 1 << 20;
  const auto next = by_base_.upper_bound(address);
  if (next != by_base_.begin()) {
    const auto& [base, range] = *std::prev(next);
    const uintptr_t past = address + bytes - range.end;
    if (address + bytes > range.end && past < kNear) {
      return format(" (ends %zu bytes past a range of %zu bytes)", size_t(past), size_t(range.end - base));
    }
  }
  if (next == by_base_.end() || next->first - address >= kNear) return "";
  return format(" (starts %zu bytes before a range of %zu bytes)", size_t(next->first - address),
                size_t(next->second.end - next->first));
}

uint32_t check_global(const void* address, uint32_t bytes, uint32_t alignment, Access access,
                      const Instruction& instruction, Proxy proxy) {
  const CallSite site = instruction.site;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
  if (begin % alignment) {
    fail("misaligned", site, "%s: global address %p is not a multiple of %u", instruction.name, address, alignment);
  }
  if (bytes == 0) return 0;
  const Warp& warp = *current->warp;
  const bool later = access == Access::kBulkWrite;
  const uint32_t time = later ? kNever : warp.clock.at[warp.cluster_id];
  const size_t store = later ? machine->bulk_stores.size() : 0;
  const GlobalAccess now{access, machine->cluster, warp.cluster_id, time, store, warp.block->index, instruction};
  const Verdict verdict = machine->global->check(begin, bytes);
  if (verdict == Verdict::kReadOnly && now.writes()) {
    fail("gmem-readonly", site, "%s: %u bytes at %p are in a read-only range", instruction.name, bytes, address);
  }
  if (verdict == Verdict::kOutside) {
    fail("gmem-oob", site, "%s: %u bytes at %p are outside every registered range%s", instruction.name, bytes, address,
         machine->global->describe_neighbour(begin, bytes).c_str());
  }
  if (!machine->options.check_races) return 0;
  uint32_t mark = 0;
  if (verdict == Verdict::kReadWrite) {  // nobody writes elsewhere
    std::string conflict;
    mark = machine->global->note_access(begin, bytes, now, warp.clock, proxy, conflict);
    if (!conflict.empty()) {
      fail("race", site, "%s: %u bytes at %p, which %s", instruction.name, bytes, address, conflict.c_str());
    }
  }
  if (!machine->bulk_stores.empty()) check_against_bulk_stores(begin, bytes, proxy, instruction);
  return mark;
}

}  // namespace ffpa::emu
