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

// The instruction lists every accumulator register by name, so each width needs its own text. Operands after the
// accumulators are numbered by the caller. No other file uses these macros.
#define FFPA_WGMMA_ACCUMULATORS_8 "%0, %1, %2, %3"
#define FFPA_WGMMA_ACCUMULATORS_64                                         \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FFPA_WGMMA_ACCUMULATORS_80 FFPA_WGMMA_ACCUMULATORS_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FFPA_WGMMA_ACCUMULATORS_96 FFPA_WGMMA_ACCUMULATORS_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FFPA_WGMMA_ACCUMULATORS_112 FFPA_WGMMA_ACCUMULATORS_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FFPA_WGMMA_ACCUMULATORS_128 FFPA_WGMMA_ACCUMULATORS_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FFPA_WGMMA_ACCUMULATORS_160 \
  FFPA_WGMMA_ACCUMULATORS_128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define FFPA_WGMMA_ACCUMULATORS_192 \
  FFPA_WGMMA_ACCUMULATORS_160 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FFPA_WGMMA_ACCUMULATORS_224 \
  FFPA_WGMMA_ACCUMULATORS_192       \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define FFPA_WGMMA_ACCUMULATORS_256 \
  FFPA_WGMMA_ACCUMULATORS_224       \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FFPA_WGMMA_EIGHT(d, i)                                                                                \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define FFPA_WGMMA_BIND_8(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define FFPA_WGMMA_BIND_64(d) \
  FFPA_WGMMA_EIGHT(d, 0), FFPA_WGMMA_EIGHT(d, 8), FFPA_WGMMA_EIGHT(d, 16), FFPA_WGMMA_EIGHT(d, 24)
#define FFPA_WGMMA_BIND_80(d) FFPA_WGMMA_BIND_64(d), FFPA_WGMMA_EIGHT(d, 32)
#define FFPA_WGMMA_BIND_96(d) FFPA_WGMMA_BIND_80(d), FFPA_WGMMA_EIGHT(d, 40)
#define FFPA_WGMMA_BIND_112(d) FFPA_WGMMA_BIND_96(d), FFPA_WGMMA_EIGHT(d, 48)
#define FFPA_WGMMA_BIND_128(d) FFPA_WGMMA_BIND_112(d), FFPA_WGMMA_EIGHT(d, 56)
#define FFPA_WGMMA_BIND_160(d) FFPA_WGMMA_BIND_128(d), FFPA_WGMMA_EIGHT(d, 64), FFPA_WGMMA_EIGHT(d, 72)
#define FFPA_WGMMA_BIND_192(d) FFPA_WGMMA_BIND_160(d), FFPA_WGMMA_EIGHT(d, 80), FFPA_WGMMA_EIGHT(d, 88)
#define FFPA_WGMMA_BIND_224(d) FFPA_WGMMA_BIND_192(d), FFPA_WGMMA_EIGHT(d, 96), FFPA_WGMMA_EIGHT(d, 104)
#define FFPA_WGMMA_BIND_256(d) FFPA_WGMMA_BIND_224(d), FFPA_WGMMA_EIGHT(d, 112), FFPA_WGMMA_EIGHT(d, 120)

// `accumulate` is a predicate: false overwrites D, which saves clearing it. The two 1s are the signs of A and B.
#define FFPA_WGMMA(n, k_and_types, A, B, SCALE, TRANSPOSE_BITS, ...)                                 \
  asm volatile("{\n  .reg .pred accumulate;\n  setp.ne.b32 accumulate, " SCALE                       \
               ", 0;\n"                                                                              \
               "  wgmma.mma_async.sync.aligned.m64n" #n k_and_types " {" FFPA_WGMMA_ACCUMULATORS_##n \
               "}, " A ", " B ", accumulate, 1, 1" TRANSPOSE_BITS ";\n}"                             \
               : FFPA_WGMMA_BIND_##n(d)                                                              \
               : __VA_ARGS__)

// Each of these handles both element types of one width. Products of 8-bit elements have no transpose bits.
#define FFPA_WGMMA_16BIT(n, ...)                                                                         \
  if constexpr (kN == n && std::is_same_v<Element, Half>) FFPA_WGMMA(n, "k16.f32.f16.f16", __VA_ARGS__); \
  if constexpr (kN == n && std::is_same_v<Element, BFloat16>) FFPA_WGMMA(n, "k16.f32.bf16.bf16", __VA_ARGS__);
#define FFPA_WGMMA_SS(n, A, B, SCALE, TRANS_A, TRANS_B)                                             \
  FFPA_WGMMA_16BIT(n, A, B, SCALE, ", " TRANS_A ", " TRANS_B, "l"(a_descriptor), "l"(b_descriptor), \
                   "r"(int(accumulate)), "n"(int(kA)), "n"(int(kB)))
#define FFPA_WGMMA_RS(n, A, B, SCALE, TRANS_B)                                                       \
  FFPA_WGMMA_16BIT(n, "{" A "}", B, SCALE, ", " TRANS_B, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), \
                   "l"(b_descriptor), "r"(int(accumulate)), "n"(int(kB)))
#define FFPA_WGMMA_8BIT(n, A, B, SCALE)                                                                              \
  if constexpr (kN == n && std::is_same_v<Element, E4M3>)                                                            \
    FFPA_WGMMA(n, "k32.f32.e4m3.e4m3", A, B, SCALE, "", "l"(a_descriptor), "l"(b_descriptor), "r"(int(accumulate))); \
  if constexpr (kN == n && std::is_same_v<Element, E5M2>)                                                            \
    FFPA_WGMMA(n, "k32.f32.e5m2.e5m2", A, B, SCALE, "", "l"(a_descriptor), "l"(b_descriptor), "r"(int(accumulate)));

// Computes d += A · B with both operands in shared memory. kA and kB give the dimension along which each is contiguous.
template <class Element, int kN, OperandMajor kA = OperandMajor::kK, OperandMajor kB = OperandMajor::kK>
FFPA_DEVICE void wgmma_ss(float (&d)[kN / 2], uint64_t a_descriptor, uint64_t b_descriptor, bool accumulate) {
  static_assert(is_wgmma_width<Element>(kN), "widths with a spelled-out instruction");
  if constexpr (kIs8Bit<Element>) {
    static_assert(kA == OperandMajor::kK && kB == OperandMajor::kK, "8-bit operands are K-major");
    FFPA_WGMMA_8BIT(8, "%4", "%5", "%6")
    FFPA_WGMMA_8BIT(64, "%32", "%33", "%34")
    FFPA_WGMMA_8BIT(80, "%40", "%41", "%42")
    FFPA_WGMMA_8BIT(96, "%48", "%49", "%50")
    FFPA_WGMMA_8BIT(112, "%56", "%57", "%58")
    FFPA_WGMMA_8BIT(128, "%64", "%65", "%66")
  } else {
    FFPA_WGMMA_SS(64, "%32", "%33", "%34", "%35", "%36")
    FFPA_WGMMA_SS(128, "%64", "%65", "%66", "%67", "%68")
    FFPA_WGMMA_SS(160, "%80", "%81", "%82", "%83", "%84")
    FFPA_WGMMA_SS(192, "%96", "%97", "%98", "%99", "%100")
    FFPA_WGMMA_SS(224, "%112", "%113", "%114", "%115", "%116")
    FFPA_WGMMA_SS(256, "%128", "%129", "%130", "%131", "%132")
  }
}

// Computes d += A · B with A in registers, each warp holding its own 16 rows.
template <class Element, int kN, OperandMajor kB = OperandMajor::kK>
FFPA_DEVICE void wgmma_rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b_descriptor, bool accumulate) {
  static_assert(!kIs8Bit<Element> && is_wgmma_width<Element>(kN), "types and widths with a spelled-out instruction");
  FFPA_WGMMA_RS(64, "%32, %33, %34, %35", "%36", "%37", "%38")
  FFPA_WGMMA_RS(128, "%64, %65, %66, %67", "%68", "%69", "%70")
  FFPA_WGMMA_RS(160, "%80, %81, %82, %83", "%84", "%85", "%86")
  FFPA_WGMMA_RS(192, "%96, %97, %98, %99", "%100", "%101", "%102")
  FFPA_WGMMA_RS(224, "%112, %113, %114, %115", "%116", "%117", "%118")
  FFPA_WGMMA_RS(256, "%128, %129, %130, %131", "%132", "%133", "%134")
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
