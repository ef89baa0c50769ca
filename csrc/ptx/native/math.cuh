// Approximate single-precision functions of the special function unit, and a product that is always rounded by itself.
//
// The emulated twins are correctly rounded (to a few ulp), so results on a GPU differ within the bounds the PTX manual
// states for each instruction; everything else in csrc/ptx agrees bit for bit.
#pragma once

#include "base/compiler.h"

namespace ffpa::ptx {

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

// Returns 1 / x, at most 1 ulp off.
FFPA_DEVICE float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ffpa::ptx
