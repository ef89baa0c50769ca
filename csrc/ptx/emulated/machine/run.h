// What a program around the emulator needs: the options of its launches, and what they found.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/global_memory.h"
#include "ptx/emulated/machine/report.h"

namespace ffpa::emu {

// The way mma and wgmma add up products.
enum class Accumulation {
  kPlain,   // float additions one after the other: fast, but not what any GPU does
  kAmpere,  // two steps of 8 products, sums truncated to 24 bits below the largest term: bit-exact for sm_80
  kHopper,  // one step of 16 products, 25 bits: bit-exact for sm_90
};

struct Options {
  int arch = 80;       // compute capability; instructions that it lacks and shared memory beyond it are errors
  uint64_t seed = 0;   // 0: warps in order, each as far as it gets; 1: in reverse; from 2: random order and preemption
  int os_threads = 1;  // number of OS threads that clusters (or blocks) are spread over
  bool check_races = true;
  Accumulation accumulation = Accumulation::kPlain;
  int64_t max_steps = int64_t(2) * 1000 * 1000 * 1000;  // instructions of one cluster, after which it counts as hung
};

inline constexpr int kWarpSize = 32;
inline constexpr int kSm90 = 90;  // the architecture that brought TMA, wgmma and clusters

// The options of all launches from now on.
void set_current_options(const Options& options);

// Returns the sum of the reports of all launches since the last call.
Report take_session_report();

}  // namespace ffpa::emu
