// This file has conversions between float and packed elements of 16 and 8 bits, products of packed pairs, approximate
// single-precision functions of the special function unit, and a product that is always rounded by itself. The lowest
// part of a packed register is the element with the smallest index.
//
// The emulated ex2, lg2 and rcp are correctly rounded (to a few ulp), so results on a GPU differ within the bounds the
// PTX manual states for each instruction; everything else in csrc/ptx agrees bit for bit.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/compiler.h"
#include "base/types.h"

namespace ffpa::ptx {

// cvt.rn.{f16x2,bf16x2}.f32, "Data Movement and Conversion Instructions: cvt": converts two values in one instruction,
// rounding to nearest even. The first source operand goes to the high half.
template <class Element>
FFPA_DEVICE uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<Element, Half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    static_assert(std::is_same_v<Element, BFloat16>);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// cvt.f32.f16: converts both halves, which is exact. A bfloat16 is the upper half of a float: a shift and a mask do,
// without conversion unit (cvt.f32.bf16 needs sm_90).
template <class Element>
FFPA_DEVICE void unpack(uint32_t packed, float& low, float& high) {
  if constexpr (std::is_same_v<Element, Half>) {
    asm("{\n"
        "  .reg .b16 l, h;\n"
        "  mov.b32 {l, h}, %2;\n"
        "  cvt.f32.f16 %0, l;\n"
        "  cvt.f32.f16 %1, h;\n"
        "}"
        : "=f"(low), "=f"(high)
        : "r"(packed));
  } else {
    static_assert(std::is_same_v<Element, BFloat16>);
    low = __uint_as_float(packed << 16);
    high = __uint_as_float(packed & 0xffff0000u);
  }
}

// mul.rn.f16x2, and fma.rn.bf16x2 with -0, which changes no product (mul.bf16x2 needs sm_90): multiplies two pairs and
// rounds each of the two products once.
template <class Element>
FFPA_DEVICE uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product;
  if constexpr (std::is_same_v<Element, Half>) {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  } else {
    static_assert(std::is_same_v<Element, BFloat16>);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  }
  return product;
}

// cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32: two pack four values in the order of their bytes. They need sm_89 or later.
#define FFPA_PACK4(type)             \
  asm("{\n"                          \
      "  .reg .b16 low, high;\n"     \
      "  cvt.rn.satfinite." type     \
      "x2.f32 low, %2, %1;\n"        \
      "  cvt.rn.satfinite." type     \
      "x2.f32 high, %4, %3;\n"       \
      "  mov.b32 %0, {low, high};\n" \
      "}"                            \
      : "=r"(packed)                 \
      : "f"(first), "f"(second), "f"(third), "f"(fourth))

template <class Element>
FFPA_DEVICE uint32_t pack4(float first, float second, float third, float fourth) {
  uint32_t packed;
  if constexpr (std::is_same_v<Element, E4M3>) {
    FFPA_PACK4("e4m3");
  } else {
    static_assert(std::is_same_v<Element, E5M2>);
    FFPA_PACK4("e5m2");
  }
  return packed;
}
#undef FFPA_PACK4

// cvt.rn.f16x2.e4m3x2: two convert four values, which is exact. They need sm_89; older GPUs compute.
FFPA_DEVICE void halves_of_e4m3(uint32_t (&halves)[2], uint32_t four) {
#if __CUDA_ARCH__ >= 890
  asm("{\n"
      "  .reg .b16 low, high;\n"
      "  mov.b32 {low, high}, %2;\n"
      "  cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "  cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(halves[0]), "=r"(halves[1])
      : "r"(four));
#else
  for (int i = 0; i < 2; ++i, four >>= 16) {
    halves[i] = pack<Half>(to_float(E4M3{uint8_t(four)}), to_float(E4M3{uint8_t(four >> 8)}));
  }
#endif
}

// prmt.b32: puts the bytes of `value` into another order: byte i of the result is that of the number in digit i of
// `order`, counted from the last one.
template <uint32_t kOrder>
FFPA_DEVICE uint32_t permute_bytes(uint32_t value) {
  uint32_t permuted;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(permuted) : "r"(value), "n"(kOrder));
  return permuted;
}

// The instructions are listed under "Floating Point Instructions: ex2, lg2, rcp, mul". The `.ftz` variants are
// one instruction; without `.ftz` the compiler adds a scaling sequence for subnormals, which a softmax has no use for.
// The asm is not volatile because the functions are pure.

// Returns 2^x, at most 2 ulp off.
FFPA_DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns log2(x); absolute error at most 2^-22 for x in [0.5, 2], elsewhere relative error at most 2^-22.
FFPA_DEVICE float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns x · y, rounded to nearest. The compiler may fuse a plain product into a multiply-add, which rounds elsewhere,
// but never this one: two places get the same product. Volatile asm keeps a product in the branch that asks for it: the
// products of all scores, computed ahead of a rare branch, took 500 bytes of spilled registers.
FFPA_DEVICE float mul_rn(float x, float y) {
  float product;
  asm volatile("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(x), "f"(y));
  return product;
}

// Returns a number's bits, in a register of their own from here on. Without it, ptxas leaves bits that wait in an
// accumulator's place there until products write to it, and then serialises the products.
FFPA_DEVICE uint32_t moved_bits(float x) {
  uint32_t bits;
  asm volatile("mov.b32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

// Returns 1 / x, at most 1 ulp off.
FFPA_DEVICE float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ffpa::ptx
