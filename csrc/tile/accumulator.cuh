// A C fragment [16 × 8] in the type that the tensor cores accumulate in: float, or Half, in half the registers.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "base/types.h"
#include "ptx/instructions.cuh"

namespace ffpa::tile {

template <class Type>
struct Accumulator;

template <>
struct Accumulator<float> {
  float c[4] = {0, 0, 0, 0};

  template <class Element>
  FFPA_DEVICE void multiply_add(const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16_f32<Element>(c, a, b0, b1);
  }

  FFPA_DEVICE void get(float (&values)[4]) const {
    FFPA_UNROLL
    for (int e = 0; e < 4; ++e) values[e] = c[e];
  }

  FFPA_DEVICE void set(const float (&values)[4]) {
    FFPA_UNROLL
    for (int e = 0; e < 4; ++e) c[e] = values[e];
  }
};

template <>
struct Accumulator<Half> {
  uint32_t c[2] = {0, 0};

  template <class Element>
  FFPA_DEVICE void multiply_add(const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16_f16(c, a, b0, b1);
  }

  FFPA_DEVICE void get(float (&values)[4]) const {
    ptx::unpack<Half>(c[0], values[0], values[1]);
    ptx::unpack<Half>(c[1], values[2], values[3]);
  }

  FFPA_DEVICE void set(const float (&values)[4]) {
    c[0] = ptx::pack<Half>(values[0], values[1]);
    c[1] = ptx::pack<Half>(values[2], values[3]);
  }
};

// Multiplies rows g and g + 8 of the fragment by their factors.
template <class Type>
FFPA_DEVICE void scale_rows(Accumulator<Type>& accumulator, const float (&factor)[2]) {
  float values[4];
  accumulator.get(values);
  FFPA_UNROLL
  for (int e = 0; e < 4; ++e) values[e] *= factor[e / 2];
  accumulator.set(values);
}

}  // namespace ffpa::tile
