// Converts scores to logits and back, for scores of any size that a float holds.
//
// A score is what softmax is defined on: cap(scale · q·k) + mask, in natural units. A logit is the same in base 2, as
// the exponents of P and the row sums use it.
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

}  // namespace ffpa
