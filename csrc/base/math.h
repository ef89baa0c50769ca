// Integer helpers that work in constant expressions, on the host and on the device, and the few real constants that
// attention needs.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/compiler.h"

namespace ffpa {

inline constexpr float kInfinity = __builtin_huge_valf();
inline constexpr int kLargestInt = __INT_MAX__;
inline constexpr float kLog2e = 1.4426950408889634f;  // exp(x) = exp2(x * kLog2e)
inline constexpr float kLn2 = 0.6931471805599453f;    // log(x) = log2(x) * kLn2

template <class Int>
FFPA_HOST_DEVICE constexpr Int ceil_div(Int value, Int divisor) {
  return (value + divisor - 1) / divisor;
}

template <class Int>
FFPA_HOST_DEVICE constexpr Int round_up(Int value, Int multiple) {
  return ceil_div(value, multiple) * multiple;
}

template <class T>
FFPA_HOST_DEVICE constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}

template <class T>
FFPA_HOST_DEVICE constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}

// Divides numbers below 2^31 by one that the host knows: a product and a shift take a tenth of the time of a division.
// 2^(31 + n), with 2^n the power of two from the divisor on, is rounded up to a multiple of the divisor: that changes
// no quotient, as the multiplier is too large by less than 2^n / divisor of 2^n.
struct Divisor {
  int value = 1;
  uint32_t multiplier = 1u << 31;
  int shift = 31;

  Divisor() = default;
  explicit Divisor(int divisor) : value(max_of(divisor, 1)) {
    while ((int64_t{1} << (shift - 31)) < value) ++shift;
    multiplier = uint32_t(ceil_div(uint64_t{1} << shift, uint64_t(value)));
  }

  FFPA_HOST_DEVICE int quotient(int dividend) const { return int(uint64_t(uint32_t(dividend)) * multiplier >> shift); }
  FFPA_HOST_DEVICE int remainder(int dividend) const { return dividend - quotient(dividend) * value; }
};

// These are one instruction each, unlike max_of and min_of: where one is NaN, those give `a`, these the number.
FFPA_HOST_DEVICE float larger_of(float a, float b) { return fmaxf(a, b); }
FFPA_HOST_DEVICE float smaller_of(float a, float b) { return fminf(a, b); }

template <class T>
FFPA_HOST_DEVICE constexpr T clamp(T value, T low, T high) {
  return min_of(max_of(value, low), high);
}

}  // namespace ffpa
