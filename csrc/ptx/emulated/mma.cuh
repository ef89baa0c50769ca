// Emulated side of ptx/native/mma.cuh.
#pragma once

#include <cstdint>

#include "base/types.h"
#include "ptx/emulated/machine/matrix_ops.h"

namespace ffpa::ptx {

template <class Element>
inline constexpr emu::InputType kInputType = emu::InputType::kHalf;
template <>
inline constexpr emu::InputType kInputType<BFloat16> = emu::InputType::kBFloat16;
template <>
inline constexpr emu::InputType kInputType<E4M3> = emu::InputType::kE4M3;
template <>
inline constexpr emu::InputType kInputType<E5M2> = emu::InputType::kE5M2;

template <class Element>
inline void mma_m16n8k16_f32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             emu::CallSite site = emu::CallSite()) {
  emu::mma_m16n8k16(kInputType<Element>, emu::AccumulatorType::kFloat, d, a, b0, b1, site);
}

inline void mma_m16n8k16_f16(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             emu::CallSite site = emu::CallSite()) {
  emu::mma_m16n8k16(emu::InputType::kHalf, emu::AccumulatorType::kHalf, d, a, b0, b1, site);
}

}  // namespace ffpa::ptx
