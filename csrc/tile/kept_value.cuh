// A value that waits in shared memory for its next use, where registers belong to sums. All lanes of a warp know it,
// and each warp keeps a copy of its own, so that no warp waits for another.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"

namespace ffpa::tile {

template <class Value>
class KeptValue {
  static_assert(std::is_trivially_copyable_v<Value>, "it is kept as its bytes");
  static constexpr int kChunks = ceil_div(int(sizeof(Value)), 16);

 public:
  static constexpr uint32_t kBytes = kChunks * 16;  // bytes for each warp

  FFPA_DEVICE explicit KeptValue(uint32_t smem) : smem_(smem) {}

  // All lanes call this; they have passed a barrier since they read what was kept before.
  FFPA_DEVICE void keep(const Value& value, int lane) const {
    uint32_t words[kChunks * 4] = {};
    memcpy(words, &value, sizeof(Value));
    FFPA_UNROLL
    for (int i = 0; i < kChunks; ++i) {
      if (lane == 0) {
        ptx::st_shared_16(smem_ + i * 16, {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]});
      }
    }
    ptx::sync_warp();
  }

  FFPA_DEVICE Value get() const {
    uint32_t words[kChunks * 4];
    FFPA_UNROLL
    for (int i = 0; i < kChunks; ++i) {
      uint32_t chunk[4];
      ptx::ld_shared_16(chunk, smem_ + i * 16);
      FFPA_UNROLL
      for (int j = 0; j < 4; ++j) words[4 * i + j] = chunk[j];
    }
    Value value;
    memcpy(&value, words, sizeof(Value));
    return value;
  }

 private:
  uint32_t smem_;
};

}  // namespace ffpa::tile
