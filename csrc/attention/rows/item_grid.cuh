// These are grids of kernels whose blocks take the item of their own number, whatever the shape of the grid.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"

namespace ffpa {

// Returns a grid of one block for each of `items`, or of at most `most` blocks, which then take several items each.
inline GridDim grid_of(const AttentionParams& params, int items, int most = kLargestInt) {
  if (!params.grid_of_heads) return {uint32_t(min_of(items, most))};
  const int batch = params.is_packed() ? 1 : params.batch, heads = params.heads_q / params.tile_heads;
  const int z = min_of(batch, most), y = min_of(heads, most / z);
  return {uint32_t(min_of(items / max_of(batch * heads, 1), most / (y * z))), uint32_t(y), uint32_t(z)};
}

FFPA_DEVICE int block_number() {
  return ptx::block_x() + ptx::grid_x() * (ptx::block_y() + ptx::grid_y() * ptx::block_z());
}
FFPA_DEVICE int blocks_of_grid() { return ptx::grid_x() * ptx::grid_y() * ptx::grid_z(); }

}  // namespace ffpa
