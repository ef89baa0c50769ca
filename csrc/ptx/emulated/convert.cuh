// Emulated side of ptx/native/convert.cuh.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/types.h"

namespace ffpa::ptx {

template <class Element>
inline uint32_t pack(float low, float high) {
  return pack_bits(from_float<Element>(low).bits, from_float<Element>(high).bits);
}

template <class Element>
inline void unpack(uint32_t packed, float& low, float& high) {
  low = to_float(Element{low_bits(packed)});
  high = to_float(Element{high_bits(packed)});
}

template <class Element>
inline uint32_t multiply(uint32_t a, uint32_t b) {
  // Rounds towards zero and sets the last bit if that is inexact: as good as the exact product for rounding it further.
  const auto product = [](float x, float y) {
    const double exact = double(x) * y;
    const float nearest = float(exact);
    if (double(nearest) == exact || exact != exact) return nearest;
    const uint32_t bits = float_bits(nearest) - (std::fabs(double(nearest)) > std::fabs(exact));
    return float_from_bits(bits | 1);
  };
  float a_low, a_high, b_low, b_high;
  unpack<Element>(a, a_low, a_high);
  unpack<Element>(b, b_low, b_high);
  return pack<Element>(product(a_low, b_low), product(a_high, b_high));
}

template <class Element>
inline uint32_t pack4(float first, float second, float third, float fourth) {
  const auto bits = [](float value) { return uint32_t(from_float<Element>(value).bits); };
  return bits(first) | bits(second) << 8 | bits(third) << 16 | bits(fourth) << 24;
}

}  // namespace ffpa::ptx
