// The contents of a TMA descriptor, in a form that both compilers read.
#pragma once

#include <cstdint>

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

}  // namespace ffpa::ptx
