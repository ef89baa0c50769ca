// Storage types for floating point numbers of 16 and 8 bits, and their conversions in plain integer arithmetic.
//
// Kernels hold such data as packed uint32_t registers and convert with instructions. These types name a tensor's
// element (as a template argument) and give the host and the tests the definition that the instructions are held to.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

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

// OCP 8-bit floats: 1 sign, then 4 exponent and 3 fraction bits, no infinities, one NaN of each sign; or 5 and 2, an
// IEEE format.
struct E4M3 {
  static constexpr int kFractionBits = 3, kBias = 7;
  static constexpr uint8_t kLargest = 0x7e;  // 448
  uint8_t bits;
};
struct E5M2 {
  static constexpr int kFractionBits = 2, kBias = 15;
  static constexpr uint8_t kLargest = 0x7b;  // 57344
  uint8_t bits;
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

// These pack two 16-bit values into one register and unpack them; `low` is the element with the smaller index.
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

// An E5M2 is the upper half of a Half.
FFPA_HOST_DEVICE float to_float(E5M2 value) { return to_float(Half{uint16_t(value.bits << 8)}); }

FFPA_HOST_DEVICE float to_float(E4M3 value) {
  const uint32_t sign = uint32_t(value.bits & 0x80) << 24;
  const uint32_t magnitude = value.bits & 0x7f;
  if (magnitude == 0x7f) return float_from_bits(0x7fffffff);
  const float scaled = float_from_bits(magnitude << 20) * float_from_bits(0x7b800000);  // 2^(127 - 7), as for a Half
  return float_from_bits(sign | float_bits(scaled));
}

// Rounds to nearest even, turns overflow into infinity and NaN into the canonical 0x7fff, as cvt.rn.f16.f32 does.
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

// Rounds to nearest even and turns NaN into the canonical 0x7fff, as cvt.rn.bf16.f32 does.
FFPA_HOST_DEVICE BFloat16 bfloat16_from_float(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fff};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// Rounds to nearest even, saturates at the largest finite number and turns NaN into 0x7f, as cvt.rn.satfinite does.
template <class Float8>
FFPA_HOST_DEVICE Float8 float8_from_float(float value) {
  constexpr int kDropped = 23 - Float8::kFractionBits;
  constexpr uint32_t kSmallestNormal = uint32_t(127 + 1 - Float8::kBias) << 23;
  const uint32_t sign = float_bits(value) >> 24 & 0x80;
  const uint32_t magnitude = float_bits(value) & 0x7fffffff;
  if (magnitude > 0x7f800000) return {0x7f};
  uint32_t bits;
  if (magnitude < kSmallestNormal) {
    const uint32_t step = kSmallestNormal + (uint32_t(kDropped) << 23);  // its ulp is the step of a subnormal
    bits = float_bits(float_from_bits(magnitude) + float_from_bits(step)) - step;
  } else {
    const uint32_t round_to_even = (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1);
    bits = (magnitude - (uint32_t(127 - Float8::kBias) << 23) + round_to_even) >> kDropped;
  }
  return {uint8_t(sign | (bits < Float8::kLargest ? bits : Float8::kLargest))};
}

template <class Element>
FFPA_HOST_DEVICE Element from_float(float value) {
  if constexpr (std::is_same_v<Element, Half>) {
    return half_from_float(value);
  } else if constexpr (std::is_same_v<Element, BFloat16>) {
    return bfloat16_from_float(value);
  } else {
    return float8_from_float<Element>(value);
  }
}

}  // namespace ffpa
