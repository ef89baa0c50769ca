// The arithmetic of one 16×8×16 matrix product, in the ways Options::accumulation names.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/options.h"

namespace ffpa::emu {

enum class InputType { kHalf, kBFloat16 };
enum class AccumulatorType { kFloat, kHalf };

struct MmaTile {
  alignas(32) float a[16][16];  // [row][k]
  alignas(32) float b[16][8];   // [k][column]
  alignas(32) float c[16][8];   // [row][column], also the result
};

float to_float(InputType type, uint16_t bits);

// tile.c += tile.a · tile.b. Half accumulators are left as values that a half can hold.
void multiply_accumulate(MmaTile& tile, AccumulatorType accumulator, Accumulation model);

}  // namespace ffpa::emu
