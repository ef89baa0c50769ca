// Emulated side of ptx/native/wgmma.cuh.
#pragma once

#include <cstdint>

#include "base/types.h"
#include "ptx/emulated/machine/wgmma.h"
#include "ptx/emulated/mma.cuh"
#include "ptx/wgmma_descriptor.h"

namespace ffpa::ptx {

inline void wgmma_fence(emu::CallSite site = emu::CallSite()) { emu::wgmma_fence(site); }
inline void wgmma_commit_group(emu::CallSite site = emu::CallSite()) { emu::wgmma_commit_group(site); }

template <int kPending>
inline void wgmma_wait_group(emu::CallSite site = emu::CallSite()) {
  emu::wgmma_wait_group(kPending, site);
}

template <class Element, int kN, OperandMajor kA = OperandMajor::kK, OperandMajor kB = OperandMajor::kK>
inline void wgmma_ss(float (&d)[kN / 2], uint64_t a_descriptor, uint64_t b_descriptor, bool accumulate,
                     emu::CallSite site = emu::CallSite()) {
  static_assert(is_wgmma_width<Element>(kN), "widths that the GPU side spells out");
  static_assert(!kIs8Bit<Element> || (kA == OperandMajor::kK && kB == OperandMajor::kK), "8-bit operands are K-major");
  emu::wgmma({kN, kInputType<Element>, kA == OperandMajor::kMN, kB == OperandMajor::kMN, accumulate, d, nullptr,
              a_descriptor, b_descriptor},
             site);
}

template <class Element, int kN, OperandMajor kB = OperandMajor::kK>
inline void wgmma_rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b_descriptor, bool accumulate,
                     emu::CallSite site = emu::CallSite()) {
  static_assert(!kIs8Bit<Element> && is_wgmma_width<Element>(kN), "types and widths that the GPU side spells out");
  emu::wgmma({kN, kInputType<Element>, false, kB == OperandMajor::kMN, accumulate, d, a, 0, b_descriptor}, site);
}

}  // namespace ffpa::ptx
