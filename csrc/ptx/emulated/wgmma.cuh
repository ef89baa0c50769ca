// Emulated side of ptx/native/wgmma.cuh.
#pragma once

#include <cstdint>

#include "base/types.h"
#include "ptx/emulated/call_site.cuh"
#include "ptx/emulated/mma.cuh"
#include "ptx/wgmma_descriptor.h"

namespace ffpa::emu {

struct WgmmaOperands {
  int n;  // columns of B and D
  InputType input;
  bool a_is_mn_major;
  bool b_is_mn_major;
  bool accumulate;
  float* d;           // n / 2 accumulators of the current lane
  const uint32_t* a;  // 4 registers of the current lane, or nullptr if A is in shared memory
  uint64_t a_descriptor;
  uint64_t b_descriptor;
};
void wgmma(const WgmmaOperands& operands, CallSite site);
void wgmma_wait(int pending_groups, CallSite site);

}  // namespace ffpa::emu

namespace ffpa::ptx {

void wgmma_fence(CallSite site = CallSite());
void wgmma_commit_group(CallSite site = CallSite());

template <int kPending>
inline void wgmma_wait_group(CallSite site = CallSite()) {
  emu::wgmma_wait(kPending, site);
}

template <class Element, int kN, OperandMajor kA = OperandMajor::kK, OperandMajor kB = OperandMajor::kK>
inline void wgmma_ss(float (&d)[kN / 2], uint64_t a_descriptor, uint64_t b_descriptor, bool accumulate,
                     CallSite site = CallSite()) {
  static_assert(is_wgmma_width<Element>(kN), "widths that the GPU side spells out");
  static_assert(!kIs8Bit<Element> || (kA == OperandMajor::kK && kB == OperandMajor::kK), "8-bit operands are K-major");
  emu::wgmma({kN, emu::kInputType<Element>, kA == OperandMajor::kMN, kB == OperandMajor::kMN, accumulate, d, nullptr,
              a_descriptor, b_descriptor},
             site);
}

template <class Element, int kN, OperandMajor kB = OperandMajor::kK>
inline void wgmma_rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b_descriptor, bool accumulate,
                     CallSite site = CallSite()) {
  static_assert(!kIs8Bit<Element> && is_wgmma_width<Element>(kN), "types and widths that the GPU side spells out");
  emu::wgmma({kN, emu::kInputType<Element>, false, kB == OperandMajor::kMN, accumulate, d, a, 0, b_descriptor}, site);
}

}  // namespace ffpa::ptx
