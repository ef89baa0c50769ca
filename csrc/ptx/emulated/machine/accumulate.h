// The arithmetic of one 16×8×16 matrix product, or 16×8×32 for 8-bit elements, in the ways Options::accumulation names.
#pragma once

#include <cstdint>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "base/types.h"
#include "ptx/emulated/machine/options.h"

namespace ffpa::emu {

enum class InputType { kHalf, kBFloat16, kE4M3, kE5M2 };
enum class AccumulatorType { kFloat, kHalf };

inline constexpr int kMostDepth = 32;

inline int element_bytes(InputType type) { return type == InputType::kHalf || type == InputType::kBFloat16 ? 2 : 1; }

struct MmaTile {
  int depth = 16;                       // depth k of the product
  alignas(32) float a[16][kMostDepth];  // [row][k]
  alignas(32) float b[kMostDepth][8];   // [k][column]
  alignas(32) float c[16][8];           // [row][column], input and result
};

inline float to_float(InputType type, uint16_t bits) {
  if (type == InputType::kE4M3) return ffpa::to_float(E4M3{uint8_t(bits)});
  if (type == InputType::kE5M2) return ffpa::to_float(E5M2{uint8_t(bits)});
  if (type == InputType::kBFloat16) return ffpa::to_float(BFloat16{bits});
#if defined(__F16C__)
  return _cvtsh_ss(bits);  // gives the same values; in software this would be a third of the time of a whole mma
#else
  return ffpa::to_float(Half{bits});
#endif
}

// Computes tile.c += tile.a · tile.b. Half accumulators are left as values that a half can hold.
void multiply_accumulate(MmaTile& tile, AccumulatorType accumulator, Accumulation model);

}  // namespace ffpa::emu
