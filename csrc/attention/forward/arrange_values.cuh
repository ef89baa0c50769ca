// Arranges V for the forward of 8-bit floats: V is transposed; of each 16 keys 0, 1, 8 and 9 come first, then 2, 3, 10
// and 11, and so on; zeros follow the last key.
#pragma once

#include <cstdint>

#include "attention/params/fp8_params.h"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"

namespace ffpa {

// A block has kKeys keys and kColumns columns; a thread has 4 keys that become neighbours and 4 columns at a time. The
// columns of 4 lanes are side by side in V, the keys of 8 lanes in the result.
template <class Fields>
struct ForwardArrangeValuesConfig : Fields {
  using Params = ArrangeParams;
  static constexpr int kThreads = 128;
  static constexpr int kKeys = 128, kColumns = 64;
  static constexpr int kWarpKeys = 32, kWarpColumns = 16;  // keys and columns of a warp at a time

  static FFPA_HOST_DEVICE int column_blocks(const Params& params) { return ceil_div(params.columns, kColumns); }

  static LaunchShape launch_shape(const Params& params) {
    const uint32_t blocks_of_head = uint32_t(params.arranged_keys / kKeys) * uint32_t(column_blocks(params));
    return {{blocks_of_head * uint32_t(params.batch * params.heads)}, kThreads};
  }
};

// Returns 4 columns of a key, the first in the lowest byte.
FFPA_DEVICE uint32_t four_columns(const ArrangeParams& params, const uint8_t* head_gmem, int key, int column) {
  if (key >= params.keys) return 0;
  const uint8_t* gmem = head_gmem + key * params.key_stride + column * params.column_stride;
  if (params.words) return ptx::ld_global_4(gmem);
  uint32_t word = 0;
  FFPA_UNROLL
  for (int i = 0; i < 4; ++i) word |= uint32_t(ptx::ld_global_1(gmem + i * params.column_stride)) << 8 * i;
  return word;
}

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void forward_arrange_values(FFPA_GRID_CONSTANT const ArrangeParams params) {
  const int key_blocks = params.arranged_keys / Config::kKeys;
  const int item = ptx::block_x() / key_blocks, head = item / Config::column_blocks(params);
  const int lane = ptx::lane_id(), quad = lane / 4, warp = ptx::thread_x() / 32;
  // `place` is where the 4 keys lie in the result, `first_key` the first of them in V.
  const int place = ptx::block_x() % key_blocks * Config::kKeys + warp * Config::kWarpKeys + quad * 4;
  const int first_key = place / 16 * 16 + quad % 4 * 2;
  const uint8_t* head_gmem =
      params.v + head / params.heads * params.batch_stride + head % params.heads * params.head_stride;
  const int first_column = item % Config::column_blocks(params) * Config::kColumns + lane % 4 * 4;
  FFPA_UNROLL
  for (int step = 0; step < Config::kColumns; step += Config::kWarpColumns) {
    const int column = first_column + step;
    if (column >= params.columns) return;
    uint32_t words[4];
    FFPA_UNROLL
    for (int i = 0; i < 4; ++i) words[i] = four_columns(params, head_gmem, first_key + i % 2 + i / 2 * 8, column);
    FFPA_UNROLL
    for (int c = 0; c < 4; ++c) {
      uint32_t keys = 0;
      FFPA_UNROLL
      for (int i = 0; i < 4; ++i) keys |= (words[i] >> 8 * c & 0xff) << 8 * i;
      ptx::st_global_4(params.arranged + (int64_t(head) * params.columns + column + c) * params.arranged_keys + place,
                       keys);
    }
  }
}

}  // namespace ffpa
