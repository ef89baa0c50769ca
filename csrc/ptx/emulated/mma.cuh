// Emulated side of ptx/native/mma.cuh.
#pragma once

#include <cstdint>

#include "base/types.h"
#include "ptx/emulated/call_site.cuh"

namespace ffpa::emu {

enum class InputType { kHalf, kBFloat16, kE4M3, kE5M2 };
enum class AccumulatorType { kFloat, kHalf };

template <class Element>
inline constexpr InputType kInputType = InputType::kHalf;
template <>
inline constexpr InputType kInputType<BFloat16> = InputType::kBFloat16;
template <>
inline constexpr InputType kInputType<E4M3> = InputType::kE4M3;
template <>
inline constexpr InputType kInputType<E5M2> = InputType::kE5M2;

// `d` points to 4 floats of the current lane, also where the accumulators are halves.
void mma_m16n8k16(InputType input, AccumulatorType accumulator, float* d, const uint32_t* a, uint32_t b0, uint32_t b1,
                  CallSite site);

}  // namespace ffpa::emu

namespace ffpa::ptx {

template <class Element>
inline void mma_m16n8k16_f32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             CallSite site = CallSite()) {
  emu::mma_m16n8k16(emu::kInputType<Element>, emu::AccumulatorType::kFloat, d, a, b0, b1, site);
}

void mma_m16n8k16_f16(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, CallSite site = CallSite());

}  // namespace ffpa::ptx
