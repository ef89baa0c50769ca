// Storage types for 16-bit floating point numbers, and their conversions in plain integer arithmetic.
//
// Kernels hold 16-bit data as packed uint32_t registers and convert with ptx/convert.cuh; these types name the element
// of a tensor (as a template argument) and give the host and the tests the definition the instructions are held to.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/compiler.h"

namespace ffpa {

// IEEE binary16: 1 sign, 5 exponent, 10 fraction bits.
struct Half {
  uint16_t bits;
};

// bfloat16: the upper half of a binary32.
struct BFloat16 {
  uint16_t bits;
};

FFPA_HOST_DEVICE uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

FFPA_HOST_DEVICE float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Two 16-bit values in one register; `low` is the element with the smaller index.
FFPA_HOST_DEVICE constexpr uint32_t pack_bits(uint16_t low, uint16_t high) { return low | uint32_t(high) << 16; }
FFPA_HOST_DEVICE constexpr uint16_t low_bits(uint32_t packed) { return uint16_t(packed); }
FFPA_HOST_DEVICE constexpr uint16_t high_bits(uint32_t packed) { return uint16_t(packed >> 16); }

FFPA_HOST_DEVICE float to_float(Half value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  if (magnitude > 0x7c00) return float_from_bits(0x7fffffff);          // every NaN becomes the canonical one
  if (magnitude == 0x7c00) return float_from_bits(sign | 0x7f800000);  // infinity
  // Reading the magnitude as a binary32 exponent and fraction is off by the difference of the biases (127 - 15): one
  // multiplication by 2^112 repairs it, and makes subnormals right as well.
  const float scaled = float_from_bits(magnitude << 13) * float_from_bits(0x77800000);
  return float_from_bits(sign | float_bits(scaled));
}

FFPA_HOST_DEVICE float to_float(BFloat16 value) { return float_from_bits(uint32_t(value.bits) << 16); }

// Round to nearest even, overflow to infinity, NaN to the canonical 0x7fff, as cvt.rn.f16.f32 does.
FFPA_HOST_DEVICE Half half_from_float(float value) {
  const uint32_t sign = float_bits(value) >> 16 & 0x8000;
  const uint32_t magnitude = float_bits(value) & 0x7fffffff;
  constexpr uint32_t kSmallestOverflow = 0x477ff000;  // 65520, halfway between the largest half and 2^16
  constexpr uint32_t kSmallestNormal = 0x38800000;    // 2^-14
  if (magnitude > 0x7f800000) return {0x7fff};
  if (magnitude >= kSmallestOverflow) return {uint16_t(sign | 0x7c00)};
  if (magnitude < kSmallestNormal) {
    // 0.5 has an ulp of 2^-24, the step of a half subnormal: the addition rounds for us.
    const float shifted = float_from_bits(magnitude) + 0.5f;
    return {uint16_t(sign | (float_bits(shifted) - 0x3f000000))};
  }
  const uint32_t round_to_even = 0xfff + (magnitude >> 13 & 1);
  constexpr uint32_t kRebias = uint32_t(127 - 15) << 23;
  return {uint16_t(sign | ((magnitude - kRebias + round_to_even) >> 13))};
}

// Round to nearest even, NaN to the canonical 0x7fff, as cvt.rn.bf16.f32 does.
FFPA_HOST_DEVICE BFloat16 bfloat16_from_float(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fff};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <class Element>
FFPA_HOST_DEVICE Element from_float(float value);
template <>
FFPA_HOST_DEVICE Half from_float<Half>(float value) {
  return half_from_float(value);
}
template <>
FFPA_HOST_DEVICE BFloat16 from_float<BFloat16>(float value) {
  return bfloat16_from_float(value);
}

}  // namespace ffpa
