// Conversions between float and packed pairs of 16-bit elements, products of such pairs, and conversions from float to
// four packed 8-bit floats. The lowest part of a register is the element with the smallest index.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "base/types.h"

namespace ffpa::ptx {

// cvt.rn.{f16x2,bf16x2}.f32, "Data Movement and Conversion Instructions: cvt": converts two values in one instruction,
// rounding to nearest even. The first source operand goes to the high half.
template <class Element>
FFPA_DEVICE uint32_t pack(float low, float high);

template <>
FFPA_DEVICE uint32_t pack<Half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
FFPA_DEVICE uint32_t pack<BFloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// cvt.f32.f16: converts both halves, which is exact.
template <class Element>
FFPA_DEVICE void unpack(uint32_t packed, float& low, float& high);

template <>
FFPA_DEVICE void unpack<Half>(uint32_t packed, float& low, float& high) {
  asm("{\n"
      "  .reg .b16 l, h;\n"
      "  mov.b32 {l, h}, %2;\n"
      "  cvt.f32.f16 %0, l;\n"
      "  cvt.f32.f16 %1, h;\n"
      "}"
      : "=f"(low), "=f"(high)
      : "r"(packed));
}

// A bfloat16 is the upper half of a float: a shift and a mask do, without conversion unit (cvt.f32.bf16 needs sm_90).
template <>
FFPA_DEVICE void unpack<BFloat16>(uint32_t packed, float& low, float& high) {
  low = __uint_as_float(packed << 16);
  high = __uint_as_float(packed & 0xffff0000u);
}

// mul.rn.f16x2, and fma.rn.bf16x2 with -0, which changes no product (mul.bf16x2 needs sm_90): multiplies two pairs and
// rounds each of the two products once.
template <class Element>
FFPA_DEVICE uint32_t multiply(uint32_t a, uint32_t b);

template <>
FFPA_DEVICE uint32_t multiply<Half>(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

template <>
FFPA_DEVICE uint32_t multiply<BFloat16>(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}

// cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32: two pack four values in the order of their bytes. They need sm_89 or later.
template <class Element>
FFPA_DEVICE uint32_t pack4(float first, float second, float third, float fourth);

template <>
FFPA_DEVICE uint32_t pack4<E4M3>(float first, float second, float third, float fourth) {
  uint32_t packed;
  asm("{\n"
      "  .reg .b16 low, high;\n"
      "  cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "  cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "  mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(packed)
      : "f"(first), "f"(second), "f"(third), "f"(fourth));
  return packed;
}

template <>
FFPA_DEVICE uint32_t pack4<E5M2>(float first, float second, float third, float fourth) {
  uint32_t packed;
  asm("{\n"
      "  .reg .b16 low, high;\n"
      "  cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
      "  cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
      "  mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(packed)
      : "f"(first), "f"(second), "f"(third), "f"(fourth));
  return packed;
}

}  // namespace ffpa::ptx
