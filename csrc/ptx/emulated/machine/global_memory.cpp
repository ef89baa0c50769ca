#include "ptx/emulated/machine/global_memory.h"

#include <algorithm>
#include <cstdio>
#include <mutex>

namespace ffpa::emu {
namespace {

struct Registered {
  uintptr_t base;
  size_t bytes;
  Access access;
};

struct Registry {
  std::mutex mutex;
  std::map<uint64_t, Registered> by_id;
  uint64_t next_id = 1;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

}  // namespace

RegisteredRange::RegisteredRange(const void* base, size_t bytes, Access access) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  id_ = registry().next_id++;
  registry().by_id[id_] = {reinterpret_cast<uintptr_t>(base), bytes, access};
}

RegisteredRange::~RegisteredRange() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().by_id.erase(id_);
}

bool GlobalWriters::read(uintptr_t address, size_t bytes, uint32_t cluster) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (pages_.empty()) return true;
  for (uintptr_t at = address, next; at < address + bytes; at = next) {
    next = std::min((at / kPageBytes + 1) * kPageBytes, address + bytes);
    const auto page = pages_.find(at / kPageBytes);
    if (page == pages_.end()) continue;
    for (; at < next; at += kUnitBytes) {
      const uint32_t writer = page->second[at % kPageBytes / kUnitBytes];
      if (writer != 0 && writer != cluster + 1) return false;
    }
  }
  return true;
}

bool GlobalWriters::write(uintptr_t address, size_t bytes, uint32_t cluster) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (uintptr_t at = address, next; at < address + bytes; at = next) {
    next = std::min((at / kPageBytes + 1) * kPageBytes, address + bytes);
    Page& page = pages_[at / kPageBytes];
    for (; at < next; at += kUnitBytes) {
      uint32_t& writer = page[at % kPageBytes / kUnitBytes];
      if (writer != 0 && writer != cluster + 1) return false;
      writer = cluster + 1;
    }
  }
  return true;
}

GlobalRanges GlobalRanges::snapshot() {
  GlobalRanges ranges;
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (const auto& [id, range] : registry().by_id) {
    if (range.bytes == 0) continue;
    ranges.by_base_.insert({range.base, {range.base + range.bytes, range.access}});
    ranges.longest_ = std::max<uintptr_t>(ranges.longest_, range.bytes);
  }
  return ranges;
}

const char* GlobalRanges::check(const void* address, size_t bytes, Access wanted) const {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
  const char* verdict = "outside every registered range";
  // Ranges may overlap, so walk back from the last one that starts at or before the access.
  for (auto it = by_base_.upper_bound(begin); it != by_base_.begin();) {
    --it;
    if (begin - it->first >= longest_) break;
    if (begin + bytes > it->second.end) continue;
    if (wanted == Access::kReadOnly || it->second.access == Access::kReadWrite) return nullptr;
    verdict = "in a read-only range";
  }
  return verdict;
}

void GlobalRanges::describe_neighbour(const void* address, size_t bytes, char* text, size_t text_bytes) const {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
  constexpr uintptr_t kNear = 1 << 20;
  text[0] = '\0';
  auto next = by_base_.upper_bound(begin);
  if (next != by_base_.begin()) {
    const auto previous = std::prev(next);
    const uintptr_t past = begin + bytes - previous->second.end;
    if (begin + bytes > previous->second.end && past < kNear) {
      std::snprintf(text, text_bytes, " (ends %zu bytes past a range of %zu bytes)", size_t(past),
                    size_t(previous->second.end - previous->first));
      return;
    }
  }
  if (next != by_base_.end() && next->first - begin < kNear) {
    std::snprintf(text, text_bytes, " (starts %zu bytes before a range of %zu bytes)", size_t(next->first - begin),
                  size_t(next->second.end - next->first));
  }
}

}  // namespace ffpa::emu
