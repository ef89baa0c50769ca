// Converts scores to logits and back, for scores of any size that a float holds.
//
// A score is what softmax is defined on: cap(scale · q·k) + mask, in natural units. A logit is the same in base 2, as
// the exponents of P and the row sums use it. The maximum of a row and its exponents must come from the same logits: at
// a score of 10^9 one rounding more is a factor of 2^64.
#pragma once

#include <cmath>

#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"

namespace ffpa {

// Scores from this one on would overflow in base 2. Their logits rise half as fast as the scores instead, which keeps
// them in order and within a float; two such scores differ by 2^103 at least, so that P is 0 or 1 whatever the slope.
inline constexpr float kFlatScore = 0x1p126f;
inline constexpr float kFlatLogit = kFlatScore * kLog2e;
inline constexpr float kFlatOffset = kFlatLogit - kFlatScore / 2;

// Returns the logit of a score. Infinities and NaN stay what they are.
FFPA_DEVICE float in_base_2(float score) {
  const float half = score / 2;
  return smaller_of(larger_of(ptx::mul_rn(score, kLog2e), half - kFlatOffset), half + kFlatOffset);
}

// Returns the score of a logit: in_base_2 makes the same logit of it again.
FFPA_DEVICE float in_natural_units(float logit) {
  return std::fabs(logit) <= kFlatLogit ? ptx::mul_rn(logit, kLn2) : 2 * (logit - std::copysign(kFlatOffset, logit));
}

// An exponent may be fused as x · factor - reference, with an x that is no logit yet, while the row's maximum is a
// logit no larger than this: the reference is then within 2^-11 of the maximum's product. Beyond that, all values
// become logits first.
inline constexpr float kMostFusedLogit = 0x1p14f;

// Kernels of several kinds round scores and LSEs. An LSE counts as what its row's scores give, and a score as the
// largest of its row, where they are no further apart than this, relative to their size.
inline constexpr float kRoundingsOfLse = 0x1p-21f;
inline constexpr float kRoundingsOfScore = 0x1p-22f;

// The factors that raw products, or scores, are still to be multiplied with.
struct LogitScale {
  float natural;  // gives scores; 1 where x is a score already
  float factor;   // gives logits, where these are small

  FFPA_DEVICE float logit(float x) const { return in_base_2(ptx::mul_rn(x, natural)); }
};
FFPA_DEVICE LogitScale scale_of_scores() { return {1, kLog2e}; }

// Products, or scores, become exponents of P by one multiply-add that rounds once: x · slope - reference. That treats
// all keys alike whatever their size, but the reference has to be near the largest logit, x · factor, and floats beyond
// 2^27 are too far apart for it. So rows with logits that large have a power of two as slope, whose products are exact:
// scores are as far apart, so that P hardly depends on it. It is no smaller than the factor: logits stay in order.
struct Slopes {
  float factor, coarse;

  static constexpr float kMostFine = 0x1p27f;

  static FFPA_DEVICE Slopes of(float factor) {
    return {factor, float_from_bits((float_bits(factor) + 0x007fffff) & 0x7f800000)};
  }
  // Returns the slope of a row whose largest logit, or reference, is `logit`.
  FFPA_DEVICE float at(float logit) const { return std::fabs(logit) <= kMostFine ? factor : coarse; }
  FFPA_DEVICE float logit(float x) const { return x * at(x * factor); }
};

}  // namespace ffpa
