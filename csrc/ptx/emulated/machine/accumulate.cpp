#include "ptx/emulated/machine/accumulate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif
#include <vector>

#include "base/types.h"

namespace ffpa::emu {
namespace {

// A float: value = significand · 2^(exponent - fraction bits), |significand| in [2^fraction, 2^(fraction + 1)), or 0.
struct Unpacked {
  int64_t significand = 0;
  int exponent = kZeroExponent;
  static constexpr int kZeroExponent = -100000;
  static constexpr int kFraction = 23;
};

Unpacked unpack(float value) {
  Unpacked result;
  if (value == 0) return result;
  const uint32_t bits = float_bits(value);
  const int biased_exponent = bits >> 23 & 0xff;
  int64_t magnitude = bits & 0x7fffff;
  if (biased_exponent) {
    magnitude |= 1 << Unpacked::kFraction;
    result.exponent = biased_exponent - 127;
  } else {  // subnormal: normalise it
    const int leading_zeros = __builtin_clz(uint32_t(magnitude)) - (31 - Unpacked::kFraction);
    magnitude <<= leading_zeros;
    result.exponent = -126 - leading_zeros;
  }
  result.significand = value < 0 ? -magnitude : magnitude;
  return result;
}

// Returns significand · 2^shift, truncated toward zero.
int64_t shift_toward_zero(int64_t significand, int shift) {
  if (shift >= 0) return significand * (int64_t(1) << shift);
  if (shift < -62) return 0;
  const int64_t magnitude = (significand < 0 ? -significand : significand) >> -shift;
  return significand < 0 ? -magnitude : magnitude;
}

float round_toward_zero(double value) {
  const float rounded = float(value);
  if (std::fabs(double(rounded)) <= std::fabs(value)) return rounded;
  return float_from_bits(float_bits(rounded) - 1);
}

// Hopper's sums of products of 8-bit elements keep this many bits of a float's fraction.
constexpr int k8BitFraction = 13;

// Takes one step of a tensor core: aligns all products and c to the largest exponent among them, cuts them off `bits`
// bits below it, adds them exactly, and rounds the sum toward zero to float, or to nearest even to half. Where `bits`
// is below a float's precision, it rounds toward zero to that many bits. (This follows the models of arXiv 2511.10909
// and 2512.07004; hardware confirms it for 16-bit elements.)
float fused_dot_add(const Unpacked* a, const Unpacked* b, int count, float c_value, int bits,
                    AccumulatorType accumulator) {
  constexpr int kProductFraction = 2 * Unpacked::kFraction;
  const Unpacked c = unpack(c_value);
  int largest = c.exponent;
  for (int k = 0; k < count; ++k) {
    if (a[k].significand && b[k].significand) largest = std::max(largest, a[k].exponent + b[k].exponent);
  }
  if (largest == Unpacked::kZeroExponent) return 0.0f;
  int64_t sum = shift_toward_zero(c.significand, bits + c.exponent - largest - Unpacked::kFraction);
  for (int k = 0; k < count; ++k) {
    const int exponent = a[k].exponent + b[k].exponent;
    sum += shift_toward_zero(a[k].significand * b[k].significand, bits + exponent - largest - kProductFraction);
  }
  const double exact = std::ldexp(double(sum), largest - bits);
  if (accumulator == AccumulatorType::kHalf) return to_float(half_from_float(float(exact)));
  const float rounded = round_toward_zero(exact);
  return bits == k8BitFraction ? float_from_bits(float_bits(rounded) & ~0u << (23 - k8BitFraction)) : rounded;
}

// Infinities and NaN do not depend on the order of additions; a NaN result is the canonical one.
float non_finite_dot_add(const float* a, const float (*b)[8], int depth, int column, float c) {
  double sum = c;
  for (int k = 0; k < depth; ++k) sum += double(a[k]) * b[k][column];
  return std::isnan(sum) ? float_from_bits(0x7fffffff) : float(sum);
}

// An UnpackedLine is a row of A or a column of B; its values count only if all are finite.
struct UnpackedLine {
  UnpackedLine(const float* first, int distance, int depth) {
    for (int k = 0; k < depth && is_finite; ++k) {
      is_finite = std::isfinite(first[k * distance]);
      if (is_finite) values[k] = unpack(first[k * distance]);
    }
  }

  bool is_finite = true;
  Unpacked values[kMostDepth];
};

void accumulate_as_hardware(MmaTile& tile, AccumulatorType accumulator, Accumulation model) {
  std::vector<UnpackedLine> a, b;
  a.reserve(16);
  b.reserve(8);
  for (int row = 0; row < 16; ++row) a.emplace_back(tile.a[row], 1, tile.depth);
  for (int column = 0; column < 8; ++column) b.emplace_back(&tile.b[0][column], 8, tile.depth);
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float& c = tile.c[row][column];
      if (!a[row].is_finite || !b[column].is_finite || !std::isfinite(c)) {
        c = non_finite_dot_add(tile.a[row], tile.b, tile.depth, column, c);
      } else if (model == Accumulation::kAmpere) {
        c = fused_dot_add(a[row].values, b[column].values, 8, c, 24, accumulator);
        c = fused_dot_add(a[row].values + 8, b[column].values + 8, 8, c, 24, accumulator);
      } else {
        const int bits = tile.depth == kMostDepth ? k8BitFraction : 25;
        c = fused_dot_add(a[row].values, b[column].values, tile.depth, c, bits, accumulator);
      }
    }
  }
}

// Adds one row of c at a time in vector registers: this loop is most of the emulator's arithmetic.
void accumulate_plainly(MmaTile& tile, AccumulatorType accumulator) {
  typedef float Row __attribute__((vector_size(8 * sizeof(float))));
  Row b[kMostDepth];
  std::memcpy(b, tile.b, tile.depth * sizeof(Row));
  for (int row = 0; row < 16; ++row) {
    Row c;
    std::memcpy(&c, tile.c[row], sizeof(c));
    for (int k = 0; k < tile.depth; ++k) {
      const float a = tile.a[row][k];
      c += Row{a, a, a, a, a, a, a, a} * b[k];
    }
    std::memcpy(tile.c[row], &c, sizeof(c));
  }
  if (accumulator == AccumulatorType::kFloat) return;
  for (auto& row : tile.c) {
    for (float& value : row) value = to_float(half_from_float(value));
  }
}

}  // namespace

float to_float(InputType type, uint16_t bits) {
  if (type == InputType::kE4M3) return ffpa::to_float(E4M3{uint8_t(bits)});
  if (type == InputType::kE5M2) return ffpa::to_float(E5M2{uint8_t(bits)});
  if (type == InputType::kBFloat16) return ffpa::to_float(BFloat16{bits});
#if defined(__F16C__)
  return _cvtsh_ss(bits);  // gives the same values; in software this would be a third of the time of a whole mma
#else
  return ffpa::to_float(Half{bits});
#endif
}

void multiply_accumulate(MmaTile& tile, AccumulatorType accumulator, Accumulation model) {
  if (model == Accumulation::kPlain) {
    accumulate_plainly(tile, accumulator);
  } else {
    accumulate_as_hardware(tile, accumulator, model);
  }
}

}  // namespace ffpa::emu
