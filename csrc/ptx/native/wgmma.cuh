// wgmma (sm_90a): D[64×N] += A[64×16] · B[16×N] by a warpgroup (4 warps), asynchronously, with operands in shared
// memory.
//
// d[kN / 2] of a lane: warp w of the group has rows 16·w … 16·w + 15; d[4·j + v] is value v of the m16n8k16 C fragment
// (tile/fragments.cuh) at columns 8·j … 8·j + 7. a[4] is an m16n8k16 A fragment of the warp's 16 rows.
// Order of use: wgmma_fence, products, wgmma_commit_group, wgmma_wait_group; accumulators and `a` are not to be touched
// from the fence to the wait.
//
// The PTX manual has it in "Asynchronous Warpgroup Level Matrix Instructions: wgmma".
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/compiler.h"
#include "base/types.h"
#include "ptx/descriptors.h"

namespace ffpa::ptx {

// wgmma.fence: orders register writes before it with the products after it. It is needed before the first product after
// anything else has written accumulators or A registers.
FFPA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

FFPA_DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group: waits until at most `kPending` groups remain in flight.
template <int kPending>
FFPA_DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The instruction lists its accumulators by number, and what comes after them is numbered from there on, so each width
// has a text of its own: accumulators come four by four, EACH(n, …) gives the seven numbers behind them, and Q writes
// four as a text or as operands. No other file uses these macros.
#define FFPA_WGMMA_FOURS_8(Q)
#define FFPA_WGMMA_FOURS_16(Q) FFPA_WGMMA_FOURS_8(Q) Q(4, 5, 6, 7)
#define FFPA_WGMMA_FOURS_24(Q) FFPA_WGMMA_FOURS_16(Q) Q(8, 9, 10, 11)
#define FFPA_WGMMA_FOURS_32(Q) FFPA_WGMMA_FOURS_24(Q) Q(12, 13, 14, 15)
#define FFPA_WGMMA_FOURS_40(Q) FFPA_WGMMA_FOURS_32(Q) Q(16, 17, 18, 19)
#define FFPA_WGMMA_FOURS_48(Q) FFPA_WGMMA_FOURS_40(Q) Q(20, 21, 22, 23)
#define FFPA_WGMMA_FOURS_56(Q) FFPA_WGMMA_FOURS_48(Q) Q(24, 25, 26, 27)
#define FFPA_WGMMA_FOURS_64(Q) FFPA_WGMMA_FOURS_56(Q) Q(28, 29, 30, 31)
#define FFPA_WGMMA_FOURS_72(Q) FFPA_WGMMA_FOURS_64(Q) Q(32, 33, 34, 35)
#define FFPA_WGMMA_FOURS_80(Q) FFPA_WGMMA_FOURS_72(Q) Q(36, 37, 38, 39)
#define FFPA_WGMMA_FOURS_88(Q) FFPA_WGMMA_FOURS_80(Q) Q(40, 41, 42, 43)
#define FFPA_WGMMA_FOURS_96(Q) FFPA_WGMMA_FOURS_88(Q) Q(44, 45, 46, 47)
#define FFPA_WGMMA_FOURS_104(Q) FFPA_WGMMA_FOURS_96(Q) Q(48, 49, 50, 51)
#define FFPA_WGMMA_FOURS_112(Q) FFPA_WGMMA_FOURS_104(Q) Q(52, 53, 54, 55)
#define FFPA_WGMMA_FOURS_120(Q) FFPA_WGMMA_FOURS_112(Q) Q(56, 57, 58, 59)
#define FFPA_WGMMA_FOURS_128(Q) FFPA_WGMMA_FOURS_120(Q) Q(60, 61, 62, 63)
#define FFPA_WGMMA_FOURS_136(Q) FFPA_WGMMA_FOURS_128(Q) Q(64, 65, 66, 67)
#define FFPA_WGMMA_FOURS_144(Q) FFPA_WGMMA_FOURS_136(Q) Q(68, 69, 70, 71)
#define FFPA_WGMMA_FOURS_152(Q) FFPA_WGMMA_FOURS_144(Q) Q(72, 73, 74, 75)
#define FFPA_WGMMA_FOURS_160(Q) FFPA_WGMMA_FOURS_152(Q) Q(76, 77, 78, 79)
#define FFPA_WGMMA_FOURS_168(Q) FFPA_WGMMA_FOURS_160(Q) Q(80, 81, 82, 83)
#define FFPA_WGMMA_FOURS_176(Q) FFPA_WGMMA_FOURS_168(Q) Q(84, 85, 86, 87)
#define FFPA_WGMMA_FOURS_184(Q) FFPA_WGMMA_FOURS_176(Q) Q(88, 89, 90, 91)
#define FFPA_WGMMA_FOURS_192(Q) FFPA_WGMMA_FOURS_184(Q) Q(92, 93, 94, 95)
#define FFPA_WGMMA_FOURS_200(Q) FFPA_WGMMA_FOURS_192(Q) Q(96, 97, 98, 99)
#define FFPA_WGMMA_FOURS_208(Q) FFPA_WGMMA_FOURS_200(Q) Q(100, 101, 102, 103)
#define FFPA_WGMMA_FOURS_216(Q) FFPA_WGMMA_FOURS_208(Q) Q(104, 105, 106, 107)
#define FFPA_WGMMA_FOURS_224(Q) FFPA_WGMMA_FOURS_216(Q) Q(108, 109, 110, 111)
#define FFPA_WGMMA_FOURS_232(Q) FFPA_WGMMA_FOURS_224(Q) Q(112, 113, 114, 115)
#define FFPA_WGMMA_FOURS_240(Q) FFPA_WGMMA_FOURS_232(Q) Q(116, 117, 118, 119)
#define FFPA_WGMMA_FOURS_248(Q) FFPA_WGMMA_FOURS_240(Q) Q(120, 121, 122, 123)
#define FFPA_WGMMA_FOURS_256(Q) FFPA_WGMMA_FOURS_248(Q) Q(124, 125, 126, 127)
#define FFPA_WGMMA_NAMES(a, b, c, d) ", %" #a ", %" #b ", %" #c ", %" #d
#define FFPA_WGMMA_OPERANDS(i, j, k, l) , "+f"(d[i]), "+f"(d[j]), "+f"(d[k]), "+f"(d[l])
#define FFPA_WGMMA_WIDTHS(EACH)                 \
  EACH(8, 4, 5, 6, 7, 8, 9, 10);                \
  EACH(16, 8, 9, 10, 11, 12, 13, 14);           \
  EACH(24, 12, 13, 14, 15, 16, 17, 18);         \
  EACH(32, 16, 17, 18, 19, 20, 21, 22);         \
  EACH(40, 20, 21, 22, 23, 24, 25, 26);         \
  EACH(48, 24, 25, 26, 27, 28, 29, 30);         \
  EACH(56, 28, 29, 30, 31, 32, 33, 34);         \
  EACH(64, 32, 33, 34, 35, 36, 37, 38);         \
  EACH(72, 36, 37, 38, 39, 40, 41, 42);         \
  EACH(80, 40, 41, 42, 43, 44, 45, 46);         \
  EACH(88, 44, 45, 46, 47, 48, 49, 50);         \
  EACH(96, 48, 49, 50, 51, 52, 53, 54);         \
  EACH(104, 52, 53, 54, 55, 56, 57, 58);        \
  EACH(112, 56, 57, 58, 59, 60, 61, 62);        \
  EACH(120, 60, 61, 62, 63, 64, 65, 66);        \
  EACH(128, 64, 65, 66, 67, 68, 69, 70);        \
  EACH(136, 68, 69, 70, 71, 72, 73, 74);        \
  EACH(144, 72, 73, 74, 75, 76, 77, 78);        \
  EACH(152, 76, 77, 78, 79, 80, 81, 82);        \
  EACH(160, 80, 81, 82, 83, 84, 85, 86);        \
  EACH(168, 84, 85, 86, 87, 88, 89, 90);        \
  EACH(176, 88, 89, 90, 91, 92, 93, 94);        \
  EACH(184, 92, 93, 94, 95, 96, 97, 98);        \
  EACH(192, 96, 97, 98, 99, 100, 101, 102);     \
  EACH(200, 100, 101, 102, 103, 104, 105, 106); \
  EACH(208, 104, 105, 106, 107, 108, 109, 110); \
  EACH(216, 108, 109, 110, 111, 112, 113, 114); \
  EACH(224, 112, 113, 114, 115, 116, 117, 118); \
  EACH(232, 116, 117, 118, 119, 120, 121, 122); \
  EACH(240, 120, 121, 122, 123, 124, 125, 126); \
  EACH(248, 124, 125, 126, 127, 128, 129, 130); \
  EACH(256, 128, 129, 130, 131, 132, 133, 134);

// `accumulate` is a predicate: false overwrites D, which saves clearing it. The two 1s are the signs of A and B.
#define FFPA_WGMMA(n, k_and_types, A, B, SCALE, TRANSPOSE_BITS, ...)                                                \
  asm volatile("{\n  .reg .pred accumulate;\n  setp.ne.b32 accumulate, %" SCALE                                     \
               ", 0;\n  wgmma.mma_async.sync.aligned.m64n" #n k_and_types                                           \
               " {%0, %1, %2, %3" FFPA_WGMMA_FOURS_##n(FFPA_WGMMA_NAMES) "}, " A ", %" B                            \
                                                                         ", accumulate, 1, 1" TRANSPOSE_BITS ";\n}" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])FFPA_WGMMA_FOURS_##n(FFPA_WGMMA_OPERANDS)            \
               : __VA_ARGS__)

// Each of these handles both element types of one width. Products of 8-bit elements have no transpose bits.
#define FFPA_WGMMA_16BIT(n, ...)                                                                         \
  if constexpr (kN == n && std::is_same_v<Element, Half>) FFPA_WGMMA(n, "k16.f32.f16.f16", __VA_ARGS__); \
  if constexpr (kN == n && std::is_same_v<Element, BFloat16>) FFPA_WGMMA(n, "k16.f32.bf16.bf16", __VA_ARGS__)
#define FFPA_WGMMA_SS(n, a, b, scale, trans_a, trans_b, ...)                                                   \
  FFPA_WGMMA_16BIT(n, "%" #a, #b, #scale, ", %" #trans_a ", %" #trans_b, "l"(a_descriptor), "l"(b_descriptor), \
                   "r"(int(accumulate)), "n"(int(kA)), "n"(int(kB)))
#define FFPA_WGMMA_RS(n, i, j, k, l, b, scale, trans_b)                                                         \
  FFPA_WGMMA_16BIT(n, "{%" #i ", %" #j ", %" #k ", %" #l "}", #b, #scale, ", %" #trans_b, "r"(a[0]), "r"(a[1]), \
                   "r"(a[2]), "r"(a[3]), "l"(b_descriptor), "r"(int(accumulate)), "n"(int(kB)))
#define FFPA_WGMMA_8BIT(n, a, b, scale, ...)                                                         \
  if constexpr (kN == n && std::is_same_v<Element, E4M3>)                                            \
    FFPA_WGMMA(n, "k32.f32.e4m3.e4m3", "%" #a, #b, #scale, "", "l"(a_descriptor), "l"(b_descriptor), \
               "r"(int(accumulate)));                                                                \
  if constexpr (kN == n && std::is_same_v<Element, E5M2>)                                            \
  FFPA_WGMMA(n, "k32.f32.e5m2.e5m2", "%" #a, #b, #scale, "", "l"(a_descriptor), "l"(b_descriptor), "r"(int(accumulate)))

// Computes d += A · B with both operands in shared memory. kA and kB give the dimension along which each is contiguous.
template <class Element, int kN, OperandMajor kA = OperandMajor::kK, OperandMajor kB = OperandMajor::kK>
FFPA_DEVICE void wgmma_ss(float (&d)[kN / 2], uint64_t a_descriptor, uint64_t b_descriptor, bool accumulate) {
  static_assert(is_wgmma_width(kN), "8, 16, ... 256 columns");
  if constexpr (kIs8Bit<Element>) {
    static_assert(kA == OperandMajor::kK && kB == OperandMajor::kK, "8-bit operands are K-major");
    FFPA_WGMMA_WIDTHS(FFPA_WGMMA_8BIT)
  } else {
    FFPA_WGMMA_WIDTHS(FFPA_WGMMA_SS)
  }
}

// Computes d += A · B with A in registers, each warp holding its own 16 rows.
template <class Element, int kN, OperandMajor kB = OperandMajor::kK>
FFPA_DEVICE void wgmma_rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b_descriptor, bool accumulate) {
  static_assert(!kIs8Bit<Element> && is_wgmma_width(kN), "elements of 16 bits, 8, 16, ... 256 columns");
  FFPA_WGMMA_WIDTHS(FFPA_WGMMA_RS)
}

// setmaxnreg (sm_90a), "Miscellaneous Instructions: setmaxnreg": moves registers from warpgroups that need few to those
// that need many. Every warp of a warpgroup executes it. kRegisters counts registers per thread: 24, 32, … 256. It
// takes effect only in kernels whose FFPA_KERNEL names the number of blocks per SM.
template <int kRegisters>
FFPA_DEVICE void increase_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "setmaxnreg takes 24, 32, ... 256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
FFPA_DEVICE void decrease_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "setmaxnreg takes 24, 32, ... 256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace ffpa::ptx
