// Shared-memory matrix descriptors of wgmma: plain bits, the same for both compilers. The PTX manual describes them in
// "Asynchronous Warpgroup Level Matrix Shared Memory Layout".
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "ptx/tensor_map_spec.h"

namespace ffpa::ptx {

// The dimension along which an operand is contiguous in shared memory. The values are the instruction's transpose bits.
enum class OperandMajor { kK = 0, kMN = 1 };

// True for 8-bit elements. Products of them are K-major in both operands and take 32 of k, the bytes of 16 of others.
template <class Element>
inline constexpr bool kIs8Bit = sizeof(Element) == 1;

// Tells whether native/wgmma.cuh spells out the instruction of width n.
template <class Element>
FFPA_HOST_DEVICE constexpr bool is_wgmma_width(int n) {
  if (n == 64 || n == 128) return true;
  return kIs8Bit<Element> ? n == 8 || n == 80 || n == 96 || n == 112 : n == 160 || n == 192 || n == 224 || n == 256;
}

// A tile consists of atoms of 8 rows, each row as long as the swizzle (16 bytes without one).
//   K-major, swizzled:   stride_bytes = from 8 rows of M or N to the next 8; leading_bytes is not used.
//                        Advancing by k16 (of 8-bit elements k32) inside the atom adds 32 bytes to the address.
//   MN-major, swizzled:  a row holds consecutive M or N elements of one k; stride_bytes = from 8 k to the next 8,
//                        leading_bytes = from one atom to the next along M or N.
//   No swizzle:          leading_bytes = from one 8×8 block to the next along k, stride_bytes = along M or N.
// Atoms start at multiples of 8 rows (1024 bytes with the 128-byte swizzle): the base offset field stays 0.
FFPA_HOST_DEVICE constexpr uint64_t wgmma_descriptor(uint32_t address_smem, uint32_t leading_bytes,
                                                     uint32_t stride_bytes, Swizzle swizzle) {
  return uint64_t((address_smem & 0x3ffff) >> 4) | uint64_t(leading_bytes >> 4) << 16 |
         uint64_t(stride_bytes >> 4) << 32 | uint64_t(swizzle) << 62;
}

}  // namespace ffpa::ptx
