// Counts the exact wavefronts of shared memory from the addresses that the lanes really use.
#pragma once

#include "ptx/emulated/machine/machine.h"

namespace ffpa::emu {

// Records one warp-wide access whose addresses are all known (ldmatrix, stmatrix).
void count_wavefronts(const SharedInstruction& access);

// Records the access of the current lane; it is counted with the other lanes' at the warp's next collective.
void log_shared_access(const char* instruction, uint32_t address, int bytes, CallSite site);
void flush_access_logs(Warp& warp);

}  // namespace ffpa::emu
