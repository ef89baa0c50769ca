// mma.sync m16n8k16: one warp computes D[16×8] += A[16×16] · B[16×8]. tile/fragments.cuh has the (lane, value) maps.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "base/types.h"

namespace ffpa::ptx {

// mma.sync, "Warp Level Matrix Multiply-Accumulate Instructions: mma". m16n8k16 has the deepest k for 16-bit inputs, so
// it takes the fewest instructions. A is row-major and B column-major, the only choice of the shape. D and C are the
// same registers. Plain `asm volatile` keeps the written order, which a kernel's software pipeline relies on.
//
// d[4] f32: rows g and g + 8 (values 0-1, 2-3), columns 2·t, 2·t + 1, with g = lane / 4, t = lane % 4.
// a[4] pairs: (row g, k 2t), (row g + 8, k 2t), (row g, k 2t + 8), (row g + 8, k 2t + 8).
// b0, b1 pairs: (k 2t, column g), (k 2t + 8, column g).
template <class Element>
FFPA_DEVICE void mma_m16n8k16_f32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
FFPA_DEVICE void mma_m16n8k16_f32<Half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
FFPA_DEVICE void mma_m16n8k16_f32<BFloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Inputs and accumulators are f16; d[2] pairs: (row g, columns 2t, 2t + 1), (row g + 8, the same columns).
FFPA_DEVICE void mma_m16n8k16_f16(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 "
      "{%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace ffpa::ptx
