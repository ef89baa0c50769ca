// The arithmetic of one 16×8×16 matrix product, or 16×8×32 for 8-bit elements, in the ways Options::accumulation names.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/run.h"
#include "ptx/emulated/mma.cuh"

namespace ffpa::emu {

inline constexpr int kMostDepth = 32;

inline int element_bytes(InputType type) { return type == InputType::kHalf || type == InputType::kBFloat16 ? 2 : 1; }

struct MmaTile {
  int depth = 16;                       // depth k of the product
  alignas(32) float a[16][kMostDepth];  // [row][k]
  alignas(32) float b[kMostDepth][8];   // [k][column]
  alignas(32) float c[16][8];           // [row][column], input and result
};

float to_float(InputType type, uint16_t bits);

// Computes tile.c += tile.a · tile.b. Half accumulators are left as values that a half can hold.
void multiply_accumulate(MmaTile& tile, AccumulatorType accumulator, Accumulation model);

// Fragment maps of m16n8k16, with g = lane / 4 and t = lane % 4. wgmma uses the same maps for each warp's 16 rows.
void scatter_a_fragment(MmaTile& tile, int lane, const uint32_t* a, InputType type);
void scatter_c_fragment(MmaTile& tile, int lane, const float* d);
void gather_c_fragment(const MmaTile& tile, int lane, float* d);

}  // namespace ffpa::emu
