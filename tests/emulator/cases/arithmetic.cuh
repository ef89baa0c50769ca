// Cases for ptx/native/arithmetic.cuh.
#pragma once

#include "cases/case.h"
#include "ptx/instructions.cuh"

namespace ffpa::cases {

inline constexpr int kValues = 64;  // values per lane

template <class Element>
FFPA_KERNEL(32, 1)
void pack_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  for (int i = 0; i < kValues; ++i) {
    const uint32_t* in = input + (i * 32 + lane) * 2;
    const float low = float_from_bits(ptx::ld_global_4(in));
    const float high = float_from_bits(ptx::ld_global_4(in + 1));
    ptx::st_global_4(output + i * 32 + lane, ptx::pack<Element>(low, high));
  }
}

template <class Element>
FFPA_KERNEL(32, 1)
void multiply_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  for (int i = 0; i < kValues; ++i) {
    const uint32_t* in = input + (i * 32 + lane) * 2;
    ptx::st_global_4(output + i * 32 + lane, ptx::multiply<Element>(ptx::ld_global_4(in), ptx::ld_global_4(in + 1)));
  }
}

// Computes x · y + z with a product that is rounded by itself: no compiler may fuse the two.
FFPA_KERNEL(32, 1) void mul_rn_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  for (int i = 0; i < kValues; ++i) {
    float in[3];
    for (int j = 0; j < 3; ++j) in[j] = float_from_bits(ptx::ld_global_4(input + (i * 32 + lane) * 3 + j));
    ptx::st_global_4(output + i * 32 + lane, float_bits(ptx::mul_rn(in[0], in[1]) + in[2]));
  }
}

FFPA_KERNEL(32, 1) void moved_bits_kernel(const uint32_t* input, uint32_t* output) {
  for (int i = ptx::lane_id(); i < 32 * kValues; i += 32) {
    ptx::st_global_4(output + i, ptx::moved_bits(float_from_bits(ptx::ld_global_4(input + i))));
  }
}

// Converts every value that 16 bits can hold. NaNs become canonical, because the manual leaves their bits open.
template <class Element>
FFPA_KERNEL(1024, 1)
void unpack_kernel(const uint32_t*, uint32_t* output) {
  for (uint32_t pair = ptx::thread_x(); pair < 32768; pair += 1024) {
    float low, high;
    ptx::unpack<Element>(pack_bits(uint16_t(2 * pair), uint16_t(2 * pair + 1)), low, high);
    ptx::st_global_4(output + 2 * pair, low == low ? float_bits(low) : 0x7fffffff);
    ptx::st_global_4(output + 2 * pair + 1, high == high ? float_bits(high) : 0x7fffffff);
  }
}

// Converts every pair of 8-bit values, in either half; NaNs become canonical.
FFPA_KERNEL(1024, 1) void halves_of_e4m3_kernel(const uint32_t*, uint32_t* output) {
  const auto canonical = [](uint32_t half) { return (half & 0x7fff) > 0x7c00 ? 0x7fff : half; };
  for (uint32_t pair = ptx::thread_x(); pair < 65536; pair += 1024) {
    uint32_t halves[2];
    ptx::halves_of_e4m3(halves, pair | (pair ^ 0xffff) << 16);
    for (int i = 0; i < 2; ++i) {
      ptx::st_global_4(output + 2 * pair + i, canonical(halves[i] & 0xffff) | canonical(halves[i] >> 16) << 16);
    }
  }
}

FFPA_KERNEL(32, 1) void permute_bytes_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  for (int i = 0; i < kValues; ++i) {
    const uint32_t value = ptx::ld_global_4(input + i * 32 + lane);
    ptx::st_global_4(output + i * 32 + lane,
                     i % 2 == 0 ? ptx::permute_bytes<0x3120>(value) : ptx::permute_bytes<0x0032>(value));
  }
}

template <int kFunction>
FFPA_KERNEL(32, 1)
void math_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  for (int i = 0; i < kValues; ++i) {
    const float x = float_from_bits(ptx::ld_global_4(input + i * 32 + lane));
    float y = 0;
    if (kFunction == 0) y = ptx::ex2(x);
    if (kFunction == 1) y = ptx::lg2(x);
    if (kFunction == 2) y = ptx::rcp(x);
    ptx::st_global_4(output + i * 32 + lane, float_bits(y));
  }
}

// Computes what softmax relies on: 2^-inf = 0, 2^0 = 1, 2^inf = inf, and zero for subnormal results.
FFPA_KERNEL(32, 1) void ex2_special_kernel(const uint32_t*, uint32_t* output) {
  const uint32_t values[8] = {0xff800000, 0, 0x80000000, 0x7f800000, 0xc3160000, 0x3f800000, 0xbf800000, 0xc2fc0000};
  const int lane = ptx::lane_id();
  if (lane < 8) ptx::st_global_4(output + lane, float_bits(ptx::ex2(float_from_bits(values[lane]))));
}

inline std::vector<Case> arithmetic_cases() {
  return {
      warp_case<pack_kernel<Half>>("pack/f16", Input::kFloats, 2 * kValues, kValues),
      warp_case<pack_kernel<Half>>("pack/f16_any_magnitude", Input::kBits, 2 * kValues, kValues),
      warp_case<pack_kernel<BFloat16>>("pack/bf16", Input::kFloats, 2 * kValues, kValues),
      warp_case<pack_kernel<BFloat16>>("pack/bf16_any_magnitude", Input::kBits, 2 * kValues, kValues),
      warp_case<multiply_kernel<Half>>("multiply/f16", Input::kBits, 2 * kValues, kValues),
      warp_case<multiply_kernel<BFloat16>>("multiply/bf16", Input::kBits, 2 * kValues, kValues),
      warp_case<mul_rn_kernel>("mul_rn", Input::kFloats, 3 * kValues, kValues),
      warp_case<moved_bits_kernel>("moved_bits", Input::kBits, kValues, kValues),
      {"unpack/f16", 80, Input::kBits, 1, 65536, 0, run_kernel<unpack_kernel<Half>, 1024, 0>},
      {"unpack/bf16", 80, Input::kBits, 1, 65536, 0, run_kernel<unpack_kernel<BFloat16>, 1024, 0>},
      {"halves_of_e4m3", 80, Input::kBits, 1, 2 * 65536, 0, run_kernel<halves_of_e4m3_kernel, 1024, 0>},
      warp_case<permute_bytes_kernel>("permute_bytes", Input::kBits, kValues, kValues),
      warp_case<math_kernel<0>>("ex2", Input::kFloats, kValues, kValues, 80, 4),
      warp_case<math_kernel<1>>("lg2", Input::kPositiveFloats, kValues, kValues, 80, 8),
      warp_case<math_kernel<2>>("rcp", Input::kPositiveFloats, kValues, kValues, 80, 2),
      {"ex2/special", 80, Input::kBits, 1, 8, 0, run_kernel<ex2_special_kernel, 32, 0>},
  };
}

}  // namespace ffpa::cases
