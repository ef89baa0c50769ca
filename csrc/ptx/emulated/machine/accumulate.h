// The arithmetic of one 16×8×16 matrix product, or 16×8×32 for 8-bit elements, in the ways Options::accumulation names.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/options.h"
#include "ptx/emulated/mma.cuh"

namespace ffpa::emu {

enum class AccumulatorType { kFloat, kHalf };

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

}  // namespace ffpa::emu
