// What TMA and wgmma read of tensors and tiles, the same for both compilers: the contents of a TMA descriptor, and the
// shared-memory matrix descriptors of wgmma, which are plain bits. The PTX manual describes the latter in "Asynchronous
// Warpgroup Level Matrix Shared Memory Layout".
#pragma once

#include <cstdint>

#include "base/compiler.h"

namespace ffpa {

// A swizzle permutes the 16-byte chunks of a tile in shared memory and repeats every 8 rows of that many bytes. The
// values are those of a wgmma descriptor's swizzle field.
enum class Swizzle { kNone = 0, k128Bytes = 1, k64Bytes = 2, k32Bytes = 3 };

inline constexpr int swizzle_bytes(Swizzle swizzle) {
  return swizzle == Swizzle::kNone ? 0 : 256 >> static_cast<int>(swizzle);
}

inline constexpr int kMaxTensorRank = 5;

// A tensor of 16-bit elements. Dimensions are innermost first; the innermost one is contiguous.
struct TensorMapSpec {
  const void* base = nullptr;                  // 16-byte aligned
  int rank = 0;                                // 1 … 5
  bool bfloat16 = false;                       // false: half; only out-of-bounds NaN fill would tell them apart
  uint64_t size[kMaxTensorRank] = {};          // elements
  uint64_t stride_bytes[kMaxTensorRank] = {};  // strides of dimensions 1 …, multiples of 16; [0] is not used
  uint32_t box[kMaxTensorRank] = {};           // elements a copy moves, at most 256 in each dimension
  Swizzle swizzle = Swizzle::kNone;            // the box's innermost extent must not exceed its bytes
};

}  // namespace ffpa

namespace ffpa::ptx {

// The treatment of a copy's lines in the L2 cache. kSoon is for data that passes through once, or that comes from far
// away: its lines are the first to make room for others.
enum class Evict { kNormal, kSoon };

// The dimension along which an operand is contiguous in shared memory. The values are the instruction's transpose bits.
enum class OperandMajor { kK = 0, kMN = 1 };

// True for 8-bit elements. Products of them are K-major in both operands and take 32 of k, the bytes of 16 of others.
template <class Element>
inline constexpr bool kIs8Bit = sizeof(Element) == 1;

// Tells whether there is a wgmma of n columns.
FFPA_HOST_DEVICE constexpr bool is_wgmma_width(int n) { return n >= 8 && n <= 256 && n % 8 == 0; }

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
