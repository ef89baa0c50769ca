// Emulated side of ptx/native/register_budget.cuh.
#pragma once

#include "ptx/emulated/machine/wgmma.h"

namespace ffpa::ptx {

template <int kRegisters>
inline void increase_registers(emu::CallSite site = emu::CallSite()) {
  emu::set_max_registers(kRegisters, site);
}

template <int kRegisters>
inline void decrease_registers(emu::CallSite site = emu::CallSite()) {
  emu::set_max_registers(kRegisters, site);
}

}  // namespace ffpa::ptx
