// The change between scores and logits, for scores of any size that a float holds.
//
// A score is what softmax means: cap(scale · q·k) + mask, in natural units. A logit is the same in base 2, as exponents
// of P and row sums take it. The maximum of a row and its exponents must come from the same logits: at a score of 10^9
// one rounding more is a factor of 2^64.
#pragma once

#include <cmath>

#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/math.cuh"

namespace ffpa {

// Scores from here on would overflow in base 2. Their logits rise half as fast as they do instead, which stays in order
// and within a float; two such scores differ by 2^103 at least, so that P is 0 or 1 whatever the slope.
inline constexpr float kFlatScore = 0x1p126f;
inline constexpr float kFlatLogit = kFlatScore * kLog2e;
inline constexpr float kFlatOffset = kFlatLogit - kFlatScore / 2;

// Infinities and NaN stay what they are.
FFPA_DEVICE float in_base_2(float score) {
  const float half = score / 2;
  return smaller_of(larger_of(ptx::mul_rn(score, kLog2e), half - kFlatOffset), half + kFlatOffset);
}

// The score of a logit: in_base_2 makes the same logit of it again.
FFPA_DEVICE float in_natural_units(float logit) {
  return std::fabs(logit) <= kFlatLogit ? ptx::mul_rn(logit, kLn2) : 2 * (logit - std::copysign(kFlatOffset, logit));
}

// Exponents may be fused from what is no logit yet, x · factor - reference, while the row's maximum is a logit of this
// size at most: the reference then lacks 2^-11 of the maximum's product. Beyond, all become logits first.
inline constexpr float kMostFusedLogit = 0x1p14f;

// Kernels of several kinds round scores and LSEs. An LSE is what its row's scores say, and a score the largest of its
// row, where they are no further apart than this, relative to them.
inline constexpr float kRoundingsOfLse = 0x1p-21f;
inline constexpr float kRoundingsOfScore = 0x1p-22f;

// What raw products, or scores, still are to be multiplied with.
struct LogitScale {
  float natural;  // gives scores: 1 where they are
  float factor;   // gives logits that are small

  FFPA_DEVICE float logit(float x) const { return in_base_2(ptx::mul_rn(x, natural)); }
};
FFPA_DEVICE LogitScale scale_of_scores() { return {1, kLog2e}; }

// How products, or scores, become exponents of P by one multiply-add that rounds once: x · slope - reference. It says
// the same of all keys whatever their size, but the reference has to be near the largest logit, x · factor, and floats
// beyond 2^27 are too far apart. So rows that are as large have a slope whose products are exact, a power of two: their
// scores are as far apart, so that P hardly depends on it. It is no smaller than the factor: logits stay in order.
struct Slopes {
  float factor, coarse;

  static constexpr float kMostFine = 0x1p27f;

  static FFPA_DEVICE Slopes of(float factor) {
    return {factor, float_from_bits((float_bits(factor) + 0x007fffff) & 0x7f800000)};
  }
  // The slope of a row whose largest logit, or reference, is this.
  FFPA_DEVICE float at(float logit) const { return std::fabs(logit) <= kMostFine ? factor : coarse; }
  FFPA_DEVICE float logit(float x) const { return x * at(x * factor); }
};

}  // namespace ffpa
