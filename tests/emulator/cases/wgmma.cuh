// Cases for ptx/native/wgmma.cuh: D[64 × N] = A · B over one swizzle atom of depth, for all widths, types and layouts.
#pragma once

#include "cases/case.h"
#include "ptx/instructions.cuh"
#include "tile/fragments.cuh"

namespace ffpa::cases {

inline constexpr int kWgmmaRows = 64;
inline constexpr int kWgmmaThreads = 128;

// The layout of one operand in shared memory, written down once more, independently of the emulator.
template <Swizzle kSwizzle, ptx::OperandMajor kMajor>
struct OperandLayout {
  static constexpr bool kSwizzled = kSwizzle != Swizzle::kNone;
  static constexpr int kRowBytes = kSwizzled ? swizzle_bytes(kSwizzle) : 16;
  static constexpr int kDepth = kSwizzled ? kRowBytes / 2 : 16;  // k of the whole operand
  static constexpr bool kKMajor = kMajor == ptx::OperandMajor::kK;
  static constexpr uint32_t kAtomBytes = 8 * kRowBytes;

  // Returns the bytes of `extent` rows. MN-major atoms are whole, even where the last one is half used.
  static constexpr int bytes(int extent) {
    constexpr int kMultiple = kKMajor ? 1 : kRowBytes / 2;
    return (extent + kMultiple - 1) / kMultiple * kMultiple * kDepth * 2;
  }

  // K-major atoms are stacked along M or N; MN-major atoms along k first, then along M or N.
  static constexpr uint32_t kStrideBytes = kSwizzled ? kAtomBytes : 2 * kAtomBytes;
  static constexpr uint32_t kLeadingBytes = kSwizzled ? kDepth / 8 * kAtomBytes : kAtomBytes;
  // Bytes from one product of k16 to the next.
  static constexpr uint32_t kStepBytes = kKMajor ? 32 : 2 * kStrideBytes;

  FFPA_DEVICE static uint32_t offset(int mn, int k) {
    constexpr int kRowElements = kRowBytes / 2;
    uint32_t offset;
    if (!kSwizzled) {
      const int row = kKMajor ? mn % 8 : k % 8;
      const int column = kKMajor ? k % 8 : mn % 8;
      return mn / 8 * kStrideBytes + k / 8 * kLeadingBytes + row * 16 + column * 2;
    }
    if (kKMajor) {
      offset = mn * kRowBytes + k * 2;
    } else {
      offset = mn / kRowElements * kLeadingBytes + k / 8 * kStrideBytes + k % 8 * kRowBytes + mn % kRowElements * 2;
    }
    // 16-byte chunk c of row r in an atom lies at c ^ (r mod the number of chunks …), rows counted in 128-byte units.
    const uint32_t chunk_mask = kRowBytes / 16 - 1;
    return offset ^ ((offset / 128 & chunk_mask) * 16);
  }
};

// Copies an operand, which is [extent][depth] in global memory, to shared memory, two neighbours of the layout at a
// time.
template <class Layout>
FFPA_DEVICE void copy_operand(uint32_t smem, const uint16_t* gmem, int extent) {
  constexpr int kDepth = Layout::kDepth;
  constexpr int kPairs = Layout::kKMajor ? kDepth / 2 : kDepth;
  for (int i = ptx::thread_x(); i < extent * kDepth / 2; i += kWgmmaThreads) {
    const int mn = Layout::kKMajor ? i / kPairs : i / kPairs * 2;
    const int k = Layout::kKMajor ? i % kPairs * 2 : i % kPairs;
    const uint16_t* first = gmem + mn * kDepth + k;
    const uint16_t* second = first + (Layout::kKMajor ? 1 : kDepth);
    ptx::st_shared_4(smem + Layout::offset(mn, k), pack_bits(ptx::ld_global_2(first), ptx::ld_global_2(second)));
  }
}

// `input`: A [64][depth], then B [N][depth], in pairs; `output`: [thread][N / 2]. Two 8-bit elements go as one of 16.
template <class Element, int kN, Swizzle kSwizzle, ptx::OperandMajor kA, ptx::OperandMajor kB>
FFPA_KERNEL(kWgmmaThreads, 1)
void wgmma_ss_kernel(const uint32_t* input, uint32_t* output) {
  using LayoutA = OperandLayout<kSwizzle, kA>;
  using LayoutB = OperandLayout<kSwizzle, kB>;
  constexpr int kDepth = LayoutA::kDepth;
  const int thread = ptx::thread_x();
  const uint32_t a_smem = ptx::dynamic_smem();
  const uint32_t b_smem = a_smem + kWgmmaRows * kDepth * 2;
  const uint16_t* a_gmem = reinterpret_cast<const uint16_t*>(input);
  const uint16_t* b_gmem = a_gmem + kWgmmaRows * kDepth;
  copy_operand<LayoutA>(a_smem, a_gmem, kWgmmaRows);
  copy_operand<LayoutB>(b_smem, b_gmem, kN);
  ptx::fence_proxy_async();
  ptx::sync_block();

  float d[kN / 2];
  ptx::wgmma_fence();
  FFPA_UNROLL
  for (int step = 0; step < kDepth / 16; ++step) {
    const uint64_t a = ptx::wgmma_descriptor(a_smem + step * LayoutA::kStepBytes, LayoutA::kLeadingBytes,
                                             LayoutA::kStrideBytes, kSwizzle);
    const uint64_t b = ptx::wgmma_descriptor(b_smem + step * LayoutB::kStepBytes, LayoutB::kLeadingBytes,
                                             LayoutB::kStrideBytes, kSwizzle);
    ptx::wgmma_ss<Element, kN, kA, kB>(d, a, b, step > 0);
  }
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  FFPA_UNROLL
  for (int i = 0; i < kN / 2; ++i) ptx::st_global_4(output + thread * (kN / 2) + i, float_bits(d[i]));
}

// Computes the same with A from registers, in two groups.
template <class Element, int kN, ptx::OperandMajor kB>
FFPA_KERNEL(kWgmmaThreads, 1)
void wgmma_rs_kernel(const uint32_t* input, uint32_t* output) {
  using LayoutB = OperandLayout<Swizzle::k128Bytes, kB>;
  constexpr int kDepth = LayoutB::kDepth;
  constexpr int kSteps = kDepth / 16;
  const int thread = ptx::thread_x();
  const uint32_t b_smem = ptx::dynamic_smem();
  const uint16_t* a_gmem = reinterpret_cast<const uint16_t*>(input);
  const uint16_t* b_gmem = a_gmem + kWgmmaRows * kDepth;
  copy_operand<LayoutB>(b_smem, b_gmem, kN);
  uint32_t a[kSteps][4];
  FFPA_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    FFPA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const tile::Coordinate at = tile::a_coordinate(thread % 32, 2 * i);
      a[step][i] = ptx::ld_global_4(a_gmem + (thread / 32 * 16 + at.row) * kDepth + step * 16 + at.column);
    }
  }
  ptx::fence_proxy_async();
  ptx::sync_block();

  float d[kN / 2];
  ptx::wgmma_fence();
  FFPA_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    const uint64_t b = ptx::wgmma_descriptor(b_smem + step * LayoutB::kStepBytes, LayoutB::kLeadingBytes,
                                             LayoutB::kStrideBytes, Swizzle::k128Bytes);
    ptx::wgmma_rs<Element, kN, kB>(d, a[step], b, step > 0);
    if (step == 1) ptx::wgmma_commit_group();
  }
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  FFPA_UNROLL
  for (int i = 0; i < kN / 2; ++i) ptx::st_global_4(output + thread * (kN / 2) + i, float_bits(d[i]));
}

template <class Element, int kN, Swizzle kSwizzle, ptx::OperandMajor kA = ptx::OperandMajor::kK,
          ptx::OperandMajor kB = ptx::OperandMajor::kK>
Case wgmma_ss_case(const char* name) {
  constexpr int kDepth = OperandLayout<kSwizzle, kA>::kDepth;
  constexpr int kSmem = OperandLayout<kSwizzle, kA>::bytes(kWgmmaRows) + OperandLayout<kSwizzle, kB>::bytes(kN);
  return {name,
          90,
          sizeof(Element) == 1 ? Input::kBytes : Input::kHalves,
          (kWgmmaRows + kN) * kDepth / 2,
          kWgmmaThreads * kN / 2,
          0,
          run_kernel<wgmma_ss_kernel<Element, kN, kSwizzle, kA, kB>, kWgmmaThreads, kSmem>};
}

template <class Element, int kN, ptx::OperandMajor kB>
Case wgmma_rs_case(const char* name) {
  constexpr int kDepth = 64;
  return {
      name,
      90,
      Input::kHalves,
      (kWgmmaRows + kN) * kDepth / 2,
      kWgmmaThreads * kN / 2,
      0,
      run_kernel<wgmma_rs_kernel<Element, kN, kB>, kWgmmaThreads, OperandLayout<Swizzle::k128Bytes, kB>::bytes(kN)>};
}

// Variants are named type_N[_swizzle][_majors of A and B].
inline std::vector<Case> wgmma_cases() {
  constexpr auto kK = ptx::OperandMajor::kK;
  constexpr auto kMN = ptx::OperandMajor::kMN;
  constexpr auto k128 = Swizzle::k128Bytes;
  return {
      wgmma_ss_case<Half, 64, k128>("wgmma_ss/f16_64"),
      wgmma_ss_case<Half, 128, k128>("wgmma_ss/f16_128"),
      wgmma_ss_case<Half, 192, k128>("wgmma_ss/f16_192"),
      wgmma_ss_case<Half, 256, k128>("wgmma_ss/f16_256"),
      wgmma_ss_case<Half, 160, k128>("wgmma_ss/f16_160"),
      wgmma_ss_case<Half, 224, k128>("wgmma_ss/f16_224"),
      wgmma_ss_case<BFloat16, 64, k128>("wgmma_ss/bf16_64"),
      wgmma_ss_case<BFloat16, 128, k128>("wgmma_ss/bf16_128"),
      wgmma_ss_case<BFloat16, 192, k128>("wgmma_ss/bf16_192"),
      wgmma_ss_case<BFloat16, 256, k128>("wgmma_ss/bf16_256"),
      wgmma_ss_case<BFloat16, 160, k128>("wgmma_ss/bf16_160"),
      wgmma_ss_case<BFloat16, 224, k128>("wgmma_ss/bf16_224"),
      wgmma_ss_case<Half, 160, k128, kK, kMN>("wgmma_ss/f16_160_k_mn"),
      wgmma_ss_case<BFloat16, 160, k128, kK, kMN>("wgmma_ss/bf16_160_k_mn"),
      wgmma_ss_case<Half, 224, k128, kK, kMN>("wgmma_ss/f16_224_k_mn"),
      wgmma_ss_case<BFloat16, 224, k128, kMN, kMN>("wgmma_ss/bf16_224_mn_mn"),
      wgmma_ss_case<Half, 64, Swizzle::k64Bytes>("wgmma_ss/f16_64_swizzle64"),
      wgmma_ss_case<Half, 64, Swizzle::k32Bytes>("wgmma_ss/f16_64_swizzle32"),
      wgmma_ss_case<Half, 64, Swizzle::kNone>("wgmma_ss/f16_64_none"),
      wgmma_ss_case<Half, 64, k128, kK, kMN>("wgmma_ss/f16_64_k_mn"),
      wgmma_ss_case<Half, 256, k128, kK, kMN>("wgmma_ss/f16_256_k_mn"),
      wgmma_ss_case<BFloat16, 128, k128, kMN, kMN>("wgmma_ss/bf16_128_mn_mn"),
      wgmma_ss_case<Half, 64, k128, kMN, kK>("wgmma_ss/f16_64_mn_k"),
      wgmma_ss_case<Half, 64, Swizzle::k64Bytes, kMN, kMN>("wgmma_ss/f16_64_swizzle64_mn_mn"),
      wgmma_ss_case<Half, 64, Swizzle::k32Bytes, kMN, kMN>("wgmma_ss/f16_64_swizzle32_mn_mn"),
      wgmma_ss_case<Half, 64, Swizzle::kNone, kMN, kMN>("wgmma_ss/f16_64_none_mn_mn"),
      wgmma_ss_case<BFloat16, 8, k128>("wgmma_ss/bf16_8"),
      wgmma_ss_case<Half, 16, k128>("wgmma_ss/f16_16"),
      wgmma_ss_case<BFloat16, 24, k128>("wgmma_ss/bf16_24"),
      wgmma_ss_case<Half, 32, k128>("wgmma_ss/f16_32"),
      wgmma_ss_case<BFloat16, 40, k128>("wgmma_ss/bf16_40"),
      wgmma_ss_case<Half, 48, k128>("wgmma_ss/f16_48"),
      wgmma_ss_case<BFloat16, 56, k128>("wgmma_ss/bf16_56"),
      wgmma_ss_case<BFloat16, 72, k128>("wgmma_ss/bf16_72"),
      wgmma_ss_case<Half, 80, k128>("wgmma_ss/f16_80"),
      wgmma_ss_case<BFloat16, 88, k128>("wgmma_ss/bf16_88"),
      wgmma_ss_case<Half, 96, k128>("wgmma_ss/f16_96"),
      wgmma_ss_case<BFloat16, 104, k128>("wgmma_ss/bf16_104"),
      wgmma_ss_case<Half, 112, k128>("wgmma_ss/f16_112"),
      wgmma_ss_case<BFloat16, 120, k128>("wgmma_ss/bf16_120"),
      wgmma_ss_case<BFloat16, 136, k128>("wgmma_ss/bf16_136"),
      wgmma_ss_case<Half, 144, k128>("wgmma_ss/f16_144"),
      wgmma_ss_case<BFloat16, 152, k128>("wgmma_ss/bf16_152"),
      wgmma_ss_case<BFloat16, 168, k128>("wgmma_ss/bf16_168"),
      wgmma_ss_case<Half, 176, k128>("wgmma_ss/f16_176"),
      wgmma_ss_case<BFloat16, 184, k128>("wgmma_ss/bf16_184"),
      wgmma_ss_case<BFloat16, 200, k128>("wgmma_ss/bf16_200"),
      wgmma_ss_case<Half, 208, k128>("wgmma_ss/f16_208"),
      wgmma_ss_case<BFloat16, 216, k128>("wgmma_ss/bf16_216"),
      wgmma_ss_case<BFloat16, 232, k128>("wgmma_ss/bf16_232"),
      wgmma_ss_case<Half, 240, k128>("wgmma_ss/f16_240"),
      wgmma_ss_case<BFloat16, 248, k128>("wgmma_ss/bf16_248"),
      wgmma_ss_case<E4M3, 8, k128>("wgmma_ss/e4m3_8"),
      wgmma_ss_case<E4M3, 64, k128>("wgmma_ss/e4m3_64"),
      wgmma_ss_case<E4M3, 80, k128>("wgmma_ss/e4m3_80"),
      wgmma_ss_case<E4M3, 96, k128>("wgmma_ss/e4m3_96"),
      wgmma_ss_case<E4M3, 112, k128>("wgmma_ss/e4m3_112"),
      wgmma_ss_case<E4M3, 128, k128>("wgmma_ss/e4m3_128"),
      wgmma_ss_case<E4M3, 64, Swizzle::k64Bytes>("wgmma_ss/e4m3_64_swizzle64"),
      wgmma_ss_case<E4M3, 64, Swizzle::k32Bytes>("wgmma_ss/e4m3_64_swizzle32"),
      wgmma_ss_case<E4M3, 64, Swizzle::kNone>("wgmma_ss/e4m3_64_none"),
      wgmma_ss_case<E5M2, 8, k128>("wgmma_ss/e5m2_8"),
      wgmma_ss_case<E5M2, 64, k128>("wgmma_ss/e5m2_64"),
      wgmma_ss_case<E5M2, 80, k128>("wgmma_ss/e5m2_80"),
      wgmma_ss_case<E5M2, 96, k128>("wgmma_ss/e5m2_96"),
      wgmma_ss_case<E5M2, 112, k128>("wgmma_ss/e5m2_112"),
      wgmma_ss_case<E5M2, 128, k128>("wgmma_ss/e5m2_128"),
      wgmma_ss_case<E4M3, 16, k128>("wgmma_ss/e4m3_16"),
      wgmma_ss_case<E5M2, 24, k128>("wgmma_ss/e5m2_24"),
      wgmma_ss_case<E4M3, 32, k128>("wgmma_ss/e4m3_32"),
      wgmma_ss_case<E5M2, 40, k128>("wgmma_ss/e5m2_40"),
      wgmma_ss_case<E4M3, 48, k128>("wgmma_ss/e4m3_48"),
      wgmma_ss_case<E5M2, 56, k128>("wgmma_ss/e5m2_56"),
      wgmma_ss_case<E5M2, 72, k128>("wgmma_ss/e5m2_72"),
      wgmma_ss_case<E5M2, 88, k128>("wgmma_ss/e5m2_88"),
      wgmma_ss_case<E5M2, 104, k128>("wgmma_ss/e5m2_104"),
      wgmma_ss_case<E5M2, 120, k128>("wgmma_ss/e5m2_120"),
      wgmma_ss_case<E5M2, 136, k128>("wgmma_ss/e5m2_136"),
      wgmma_ss_case<E4M3, 144, k128>("wgmma_ss/e4m3_144"),
      wgmma_ss_case<E5M2, 152, k128>("wgmma_ss/e5m2_152"),
      wgmma_ss_case<E4M3, 160, k128>("wgmma_ss/e4m3_160"),
      wgmma_ss_case<E5M2, 168, k128>("wgmma_ss/e5m2_168"),
      wgmma_ss_case<E4M3, 176, k128>("wgmma_ss/e4m3_176"),
      wgmma_ss_case<E5M2, 184, k128>("wgmma_ss/e5m2_184"),
      wgmma_ss_case<E4M3, 192, k128>("wgmma_ss/e4m3_192"),
      wgmma_ss_case<E5M2, 200, k128>("wgmma_ss/e5m2_200"),
      wgmma_ss_case<E4M3, 208, k128>("wgmma_ss/e4m3_208"),
      wgmma_ss_case<E5M2, 216, k128>("wgmma_ss/e5m2_216"),
      wgmma_ss_case<E4M3, 224, k128>("wgmma_ss/e4m3_224"),
      wgmma_ss_case<E5M2, 232, k128>("wgmma_ss/e5m2_232"),
      wgmma_ss_case<E4M3, 240, k128>("wgmma_ss/e4m3_240"),
      wgmma_ss_case<E5M2, 248, k128>("wgmma_ss/e5m2_248"),
      wgmma_ss_case<E4M3, 256, k128>("wgmma_ss/e4m3_256"),
      wgmma_rs_case<Half, 64, kK>("wgmma_rs/f16_64"),
      wgmma_rs_case<Half, 8, kK>("wgmma_rs/f16_8"),
      wgmma_rs_case<BFloat16, 16, kK>("wgmma_rs/bf16_16"),
      wgmma_rs_case<Half, 24, kK>("wgmma_rs/f16_24"),
      wgmma_rs_case<BFloat16, 32, kK>("wgmma_rs/bf16_32"),
      wgmma_rs_case<Half, 40, kK>("wgmma_rs/f16_40"),
      wgmma_rs_case<BFloat16, 48, kK>("wgmma_rs/bf16_48"),
      wgmma_rs_case<Half, 56, kK>("wgmma_rs/f16_56"),
      wgmma_rs_case<Half, 72, kK>("wgmma_rs/f16_72"),
      wgmma_rs_case<BFloat16, 80, kK>("wgmma_rs/bf16_80"),
      wgmma_rs_case<Half, 88, kK>("wgmma_rs/f16_88"),
      wgmma_rs_case<BFloat16, 96, kK>("wgmma_rs/bf16_96"),
      wgmma_rs_case<Half, 104, kK>("wgmma_rs/f16_104"),
      wgmma_rs_case<BFloat16, 112, kK>("wgmma_rs/bf16_112"),
      wgmma_rs_case<Half, 120, kK>("wgmma_rs/f16_120"),
      wgmma_rs_case<Half, 136, kK>("wgmma_rs/f16_136"),
      wgmma_rs_case<BFloat16, 144, kK>("wgmma_rs/bf16_144"),
      wgmma_rs_case<Half, 152, kK>("wgmma_rs/f16_152"),
      wgmma_rs_case<Half, 168, kK>("wgmma_rs/f16_168"),
      wgmma_rs_case<BFloat16, 176, kK>("wgmma_rs/bf16_176"),
      wgmma_rs_case<Half, 184, kK>("wgmma_rs/f16_184"),
      wgmma_rs_case<Half, 200, kK>("wgmma_rs/f16_200"),
      wgmma_rs_case<BFloat16, 208, kK>("wgmma_rs/bf16_208"),
      wgmma_rs_case<Half, 216, kK>("wgmma_rs/f16_216"),
      wgmma_rs_case<Half, 232, kK>("wgmma_rs/f16_232"),
      wgmma_rs_case<BFloat16, 240, kK>("wgmma_rs/bf16_240"),
      wgmma_rs_case<Half, 248, kK>("wgmma_rs/f16_248"),
      wgmma_rs_case<Half, 128, kMN>("wgmma_rs/f16_128_mn"),
      wgmma_rs_case<BFloat16, 64, kMN>("wgmma_rs/bf16_64_mn"),
      wgmma_rs_case<BFloat16, 128, kK>("wgmma_rs/bf16_128"),
      wgmma_rs_case<Half, 160, kK>("wgmma_rs/f16_160"),
      wgmma_rs_case<Half, 160, kMN>("wgmma_rs/f16_160_mn"),
      wgmma_rs_case<BFloat16, 160, kMN>("wgmma_rs/bf16_160_mn"),
      wgmma_rs_case<BFloat16, 224, kK>("wgmma_rs/bf16_224"),
      wgmma_rs_case<Half, 224, kMN>("wgmma_rs/f16_224_mn"),
      wgmma_rs_case<BFloat16, 224, kMN>("wgmma_rs/bf16_224_mn"),
      wgmma_rs_case<Half, 192, kMN>("wgmma_rs/f16_192_mn"),
      wgmma_rs_case<BFloat16, 192, kMN>("wgmma_rs/bf16_192_mn"),
      wgmma_rs_case<Half, 256, kMN>("wgmma_rs/f16_256_mn"),
      wgmma_rs_case<BFloat16, 256, kMN>("wgmma_rs/bf16_256_mn"),
  };
}

}  // namespace ffpa::cases
