// The work items of a kernel are numbered: those of a head, then head after head, then batch entry after batch entry. A
// block takes the item of its own number, whatever the shape of the grid.
#pragma once

#include "attention/params/attention_params.h"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"

namespace ffpa {

// Returns a grid of one block for each item, or of at most `most` blocks, which then take several items each.
inline GridDim grid_of(const AttentionParams& params, int items_of_head, int most = kLargestInt) {
  if (!params.grid_of_heads) return {uint32_t(min_of(items_of_head * params.heads_q * params.batch, most))};
  const int z = min_of(params.batch, most), y = min_of(params.heads_q, most / z);
  return {uint32_t(min_of(items_of_head, most / (y * z))), uint32_t(y), uint32_t(z)};
}

FFPA_DEVICE int block_number() {
  return ptx::block_x() + ptx::grid_x() * (ptx::block_y() + ptx::grid_y() * ptx::block_z());
}
FFPA_DEVICE int blocks_of_grid() { return ptx::grid_x() * ptx::grid_y() * ptx::grid_z(); }

}  // namespace ffpa
