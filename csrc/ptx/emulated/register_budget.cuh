// Emulated side of ptx/native/register_budget.cuh.
#pragma once

#include "ptx/emulated/call_site.cuh"

namespace ffpa::emu {
void set_max_registers(int registers, CallSite site);
}  // namespace ffpa::emu

namespace ffpa::ptx {

template <int kRegisters>
inline void increase_registers(CallSite site = CallSite()) {
  emu::set_max_registers(kRegisters, site);
}

template <int kRegisters>
inline void decrease_registers(CallSite site = CallSite()) {
  emu::set_max_registers(kRegisters, site);
}

}  // namespace ffpa::ptx
