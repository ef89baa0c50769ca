// The box of a tensor that one TMA copy moves.
#pragma once

#include <algorithm>
#include <cstdint>

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
void for_each_box_row(const TensorMapSpec& spec, const int* coordinates, Visit visit) {
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

}  // namespace ffpa::emu
