// A product of tiles on the tensor cores, with the loads of its operands running ahead of it.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"

namespace ffpa::tile {

// A C fragment [16 × 8] in the type that the tensor cores accumulate in: float, or Half, in half the registers.
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

// Multiplies rows g and g + 8 of a C fragment by their factors.
FFPA_DEVICE void scale_rows(float (&values)[4], const float (&factor)[2]) {
  FFPA_UNROLL
  for (int e = 0; e < 4; ++e) values[e] *= factor[e / 2];
}
template <class Type>
FFPA_DEVICE void scale_rows(Accumulator<Type>& accumulator, const float (&factor)[2]) {
  float values[4];
  accumulator.get(values);
  scale_rows(values, factor);
  accumulator.set(values);
}

// Computes sums [16·kM × 8·kN of a warp] += A · B over kDepths steps of 16 in the common dimension.
//
// a(fragment, m, depth) brings the A fragment of rows 16m …, and b(fragments, depth, pair) the two B fragments of
// columns 16·pair …. A is loaded one depth ahead, one fragment at a time between the products, and B kAhead pairs
// ahead: their work (ldmatrix; the exponentials of a softmax) runs while the tensor cores work. The instructions run in
// the order written, so the loops are fully unrolled. With kAhead = 0 both are loaded when they are needed.
template <class Element, int kAhead, int kDepths, class Type, int kM, int kN, class LoadA, class LoadB>
FFPA_DEVICE void add_product(Accumulator<Type> (&sums)[kM][kN], const LoadA& a, const LoadB& b) {
  static_assert(kN % 2 == 0, "B fragments come in pairs");
  constexpr int kPairs = kN / 2;
  constexpr int kSteps = kDepths * kPairs;

  constexpr bool kAheadA = kAhead > 0;
  uint32_t a_rmem[2][kM][4];       // A fragments of this depth and the next
  uint32_t b_rmem[kAhead + 1][4];  // B fragments of this pair and the next kAhead
  FFPA_UNROLL
  for (int m = 0; kAheadA && m < kM; ++m) a(a_rmem[0][m], m, 0);
  FFPA_UNROLL
  for (int step = 0; step < min_of(kAhead, kSteps); ++step) b(b_rmem[step], step / kPairs, step % kPairs);

  FFPA_UNROLL
  for (int depth = 0; depth < kDepths; ++depth) {
    FFPA_UNROLL
    for (int m = 0; !kAheadA && m < kM; ++m) a(a_rmem[depth % 2][m], m, depth);
    FFPA_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      const int step = depth * kPairs + pair;
      const int coming = step + kAhead;
      if (coming < kSteps) b(b_rmem[coming % (kAhead + 1)], coming / kPairs, coming % kPairs);
      if (kAheadA && depth + 1 < kDepths) {
        FFPA_UNROLL
        for (int m = ceil_div(pair * kM, kPairs); m < ceil_div((pair + 1) * kM, kPairs); ++m) {
          a(a_rmem[(depth + 1) % 2][m], m, depth + 1);
        }
      }
      const uint32_t (&now)[4] = b_rmem[step % (kAhead + 1)];
      FFPA_UNROLL
      for (int m = 0; m < kM; ++m) {
        sums[m][2 * pair].template multiply_add<Element>(a_rmem[depth % 2][m], now[0], now[1]);
        sums[m][2 * pair + 1].template multiply_add<Element>(a_rmem[depth % 2][m], now[2], now[3]);
      }
    }
  }
}

// Does the same over many steps of kDepths each, with kAhead = 1 and no gap between steps: the first fragments of a
// step are loaded during the last products of the step before it.
//
// next_step() returns the address of the next step in shared memory once it is there, end_step() gives the oldest step
// back. a(fragment, step_smem, m, depth) and b(fragments, step_smem, depth, pair) bring fragments.
template <class Element, int kDepths, class Type, int kM, int kN, class NextStep, class EndStep, class LoadA,
          class LoadB>
FFPA_DEVICE void add_products(Accumulator<Type> (&sums)[kM][kN], int steps, const NextStep& next_step,
                              const EndStep& end_step, const LoadA& a, const LoadB& b) {
  static_assert(kN % 2 == 0 && kDepths % 2 == 0, "each step begins with the same registers");
  constexpr int kPairs = kN / 2;
  if (steps == 0) return;

  uint32_t a_rmem[2][kM][4], b_rmem[2][4];  // fragments of this depth or pair and the next one
  uint32_t now = next_step();
  FFPA_UNROLL
  for (int m = 0; m < kM; ++m) a(a_rmem[0][m], now, m, 0);
  b(b_rmem[0], now, 0, 0);

  FFPA_NO_UNROLL
  for (int left = steps; left > 0; --left) {
    uint32_t next = now;  // after the last step, the loads ahead go to waste
    FFPA_UNROLL
    for (int depth = 0; depth < kDepths; ++depth) {
      const bool is_last = depth == kDepths - 1;
      if (is_last && left > 1) next = next_step();
      FFPA_UNROLL
      for (int pair = 0; pair < kPairs; ++pair) {
        const bool next_depth = pair == kPairs - 1;
        b(b_rmem[(depth * kPairs + pair + 1) % 2], is_last && next_depth ? next : now,
          (depth + (next_depth ? 1 : 0)) % kDepths, next_depth ? 0 : pair + 1);
        FFPA_UNROLL
        for (int m = ceil_div(pair * kM, kPairs); m < ceil_div((pair + 1) * kM, kPairs); ++m) {
          a(a_rmem[(depth + 1) % 2][m], is_last ? next : now, m, (depth + 1) % kDepths);
        }
        const uint32_t (&b_now)[4] = b_rmem[(depth * kPairs + pair) % 2];
        FFPA_UNROLL
        for (int m = 0; m < kM; ++m) {
          sums[m][2 * pair].template multiply_add<Element>(a_rmem[depth % 2][m], b_now[0], b_now[1]);
          sums[m][2 * pair + 1].template multiply_add<Element>(a_rmem[depth % 2][m], b_now[2], b_now[3]);
        }
      }
    }
    end_step();
    now = next;
  }
}

}  // namespace ffpa::tile
