// Emulated side of ptx/native/math.cuh.
#pragma once

#include <cmath>

namespace ffpa::ptx {

// `.ftz`: subnormal inputs and results count as zero, with their sign.
inline float flush_subnormal(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

inline float ex2(float x) { return flush_subnormal(std::exp2(flush_subnormal(x))); }
inline float lg2(float x) { return flush_subnormal(std::log2(flush_subnormal(x))); }
inline float rcp(float x) { return flush_subnormal(1.0f / flush_subnormal(x)); }
// A fma computes it, because no compiler contracts that further.
inline float mul_rn(float x, float y) { return std::fma(x, y, -0.0f); }
}  // namespace ffpa::ptx
