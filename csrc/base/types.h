// Storage types for floating point numbers of 16 and 8 bits, and their conversions in plain integer arithmetic.
//
// Kernels hold such data as packed uint32_t registers and convert with instructions. These types name a tensor's
// element (as a template argument) and give the host and the tests the definition that the instructions are held to.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/compiler.h"

namespace ffpa {

// Each format says how many bits its fraction has, and what is too large becomes: infinity, or the largest number.

// IEEE binary16: 1 sign, 5 exponent, 10 fraction bits.
struct Half {
  static constexpr int kFractionBits = 10, kBias = 15;
  static constexpr uint16_t kOverflow = 0x7c00;
  uint16_t bits;
};

// bfloat16: the upper half of a binary32.
struct BFloat16 {
  static constexpr int kFractionBits = 7, kBias = 127;
  static constexpr uint16_t kOverflow = 0x7f80;
  uint16_t bits;
};

// OCP 8-bit floats: 1 sign, then 4 exponent and 3 fraction bits, no infinities, one NaN of each sign; or 5 and 2, an
// IEEE format.
struct E4M3 {
  static constexpr int kFractionBits = 3, kBias = 7;
  static constexpr uint8_t kOverflow = 0x7e;  // 448
  uint8_t bits;
};
struct E5M2 {
  static constexpr int kFractionBits = 2, kBias = 15;
  static constexpr uint8_t kOverflow = 0x7b;  // 57344
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

// Rounds to nearest even and turns NaN into 0x7fff or 0x7f, as cvt.rn does, to 8 bits with .satfinite.
template <class Element>
FFPA_HOST_DEVICE Element from_float(float value) {
  using Bits = decltype(Element::bits);
  constexpr int kDropped = 23 - Element::kFractionBits;
  constexpr uint32_t kSign = 1u << (8 * sizeof(Bits) - 1);
  constexpr uint32_t kSmallestNormal = uint32_t(127 + 1 - Element::kBias) << 23;
  constexpr bool kHasOtherExponents = Element::kBias < 127;  // its subnormals are normal floats, but for a BFloat16
  const uint32_t sign = float_bits(value) >> (32 - 8 * sizeof(Bits)) & kSign;
  const uint32_t magnitude = float_bits(value) & 0x7fffffff;
  if (magnitude > 0x7f800000) return {Bits(kSign - 1)};
  uint32_t bits;
  if (kHasOtherExponents && magnitude < kSmallestNormal) {
    // The ulp of this number is the step of a subnormal: the addition rounds for us.
    const uint32_t step = kSmallestNormal + (uint32_t(kDropped) << 23);
    bits = float_bits(float_from_bits(magnitude) + float_from_bits(step)) - step;
  } else {
    const uint32_t round_to_even = (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1);
    bits = (magnitude - (uint32_t(127 - Element::kBias) << 23) + round_to_even) >> kDropped;
  }
  return {Bits(sign | (bits < Element::kOverflow ? bits : Element::kOverflow))};
}

}  // namespace ffpa
