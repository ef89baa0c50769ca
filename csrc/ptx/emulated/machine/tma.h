// TMA: the boxes of tensors that its copies move, and the mbarriers that these complete on.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ptx/emulated/machine/machine.h"
#include "ptx/tensor_map_spec.h"

namespace ffpa::emu {

inline constexpr int kBoxElementBytes = 2;

inline uint32_t box_bytes(const TensorMapSpec& spec) {
  uint32_t bytes = kBoxElementBytes;
  for (int i = 0; i < spec.rank; ++i) bytes *= spec.box[i];
  return bytes;
}

// A row of a box: its elements first … end - 1 lie inside the tensor, `inside` is the address of the first of them.
struct BoxRow {
  uint32_t offset;  // bytes from the start of the box
  uint32_t first, end;
  uintptr_t inside;
  uint32_t inside_bytes() const { return (end - first) * kBoxElementBytes; }
};

// Calls visit(row) for all rows of a box.
template <class Visit>
void for_each_box_row(const TensorMapSpec& spec, const std::vector<int>& coordinates, Visit visit) {
  const int64_t start = coordinates[0];
  const int64_t first = std::clamp<int64_t>(-start, 0, spec.box[0]);
  const int64_t end = std::clamp<int64_t>(int64_t(spec.size[0]) - start, first, spec.box[0]);
  uint32_t index[kMaxTensorRank] = {};
  uint32_t offset = 0;
  for (;;) {
    bool inside = true;
    uintptr_t address = reinterpret_cast<uintptr_t>(spec.base) + (start + first) * kBoxElementBytes;
    for (int i = 1; i < spec.rank; ++i) {
      const int64_t position = int64_t(coordinates[i]) + index[i];
      inside &= position >= 0 && position < int64_t(spec.size[i]);
      address += position * int64_t(spec.stride_bytes[i]);
    }
    visit(BoxRow{offset, uint32_t(first), uint32_t(inside ? end : first), address});
    offset += spec.box[0] * kBoxElementBytes;
    int dimension = 1;
    while (dimension < spec.rank && ++index[dimension] == spec.box[dimension]) index[dimension++] = 0;
    if (dimension >= spec.rank) return;
  }
}

// Returns where the swizzle puts the byte that would lie at `address`.
uint32_t swizzled_address(uint32_t address, Swizzle swizzle);

// Fails unless the GPU has TMA, the coordinates fit the map, and cuTensorMapEncodeTiled would accept the description.
void check_tensor_copy(const TensorMapSpec& spec, const std::vector<int>& coordinates, CallSite site);

// Fails unless the rows may be accessed; returns how many bytes of the box lie inside the tensor.
int64_t check_box(const TensorMapSpec& spec, const std::vector<int>& coordinates, Access access,
                  const Instruction& instruction, GlobalProxy proxy);

Mbarrier& find_mbarrier(uint32_t address, const Instruction& instruction);
uint32_t remote_address(uint32_t address, uint32_t rank, CallSite site);  // stands for mapa
bool has_exited(const Block& block);

// Completes bytes of a copy that landed at this time of the TMA unit, and that its issuer began with this knowledge.
void complete_bytes(Block& block, uint32_t barrier, uint32_t bytes, const VectorClock& issuer, uint32_t landed_at);

}  // namespace ffpa::emu
