// Shuffles, votes, and the barriers of warps and blocks.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/call_site.h"

namespace ffpa::emu {

enum class Shuffle { kIndex, kXor };

uint32_t shuffle(Shuffle kind, uint32_t value, int argument, CallSite site);
uint32_t ballot(bool predicate, CallSite site);
void sync_warp(CallSite site);

inline constexpr int kWholeBlock = -1;  // thread count that stands for the whole block
void barrier_sync(int barrier, int threads, CallSite site);
void barrier_arrive(int barrier, int threads, CallSite site);

}  // namespace ffpa::emu
