// GPU side of ptx/math.cuh.
#pragma once

#include "base/compiler.h"

namespace ffpa::ptx {

// "Floating Point Instructions: ex2, lg2, rcp, tanh, mul". `.ftz` variants: one instruction; without it the compiler
// adds a scaling sequence for subnormals, which a softmax has no use for. Not volatile: pure functions.

// 2^x, at most 2 ulp off.
FFPA_DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x), absolute error at most 2^-22 for x in [0.5, 2], elsewhere relative error at most 2^-22.
FFPA_DEVICE float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x · y, rounded to nearest. Unlike a plain product, the compiler never makes a fused multiply-add of it, which would
// round elsewhere: for products that two places must have alike. Volatile, so that a product stays in the branch that
// asks for it: those of all scores at once, computed ahead of a rare branch, took 500 bytes of spilled registers.
FFPA_DEVICE float mul_rn(float x, float y) {
  float product;
  asm volatile("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(x), "f"(y));
  return product;
}

// 1 / x, at most 1 ulp off.
FFPA_DEVICE float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x), relative error at most 2^-11: enough for scores that are rounded to 16 bits afterwards, and for nothing
// else.
FFPA_DEVICE float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ffpa::ptx
