// wgmma: products that are queued when issued and computed when waited for.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/accumulate.h"
#include "ptx/emulated/machine/machine.h"

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
void wgmma_fence(CallSite site);
void wgmma_commit_group(CallSite site);
void wgmma_wait_group(int pending_groups, CallSite site);
void set_max_registers(int registers, CallSite site);

// Reports warps that executed fewer products than the others of their warpgroup.
void check_wgmma_at_exit(const Block& block);

}  // namespace ffpa::emu
