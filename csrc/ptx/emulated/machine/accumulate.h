// The arithmetic of one 16×8×16 matrix product, in the ways Options::accumulation names.
#pragma once

#include <cstdint>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "base/types.h"
#include "ptx/emulated/machine/options.h"

namespace ffpa::emu {

enum class InputType { kHalf, kBFloat16 };
enum class AccumulatorType { kFloat, kHalf };

struct MmaTile {
  alignas(32) float a[16][16];  // [row][k]
  alignas(32) float b[16][8];   // [k][column]
  alignas(32) float c[16][8];   // [row][column], also the result
};

inline float to_float(InputType type, uint16_t bits) {
  if (type == InputType::kBFloat16) return ffpa::to_float(BFloat16{bits});
#if defined(__F16C__)
  return _cvtsh_ss(bits);  // the same values; in software this would be a third of the time of a whole mma
#else
  return ffpa::to_float(Half{bits});
#endif
}

// tile.c += tile.a · tile.b. Half accumulators are left as values that a half can hold.
void multiply_accumulate(MmaTile& tile, AccumulatorType accumulator, Accumulation model);

}  // namespace ffpa::emu
