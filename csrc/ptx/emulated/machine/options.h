// Options of a run of the emulator: what it models and what it checks.
#pragma once

#include <cstddef>
#include <cstdint>

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
  bool count_bank_conflicts = true;
  bool poison = true;  // NaN fills fresh shared memory, stacks, and destinations of asynchronous copies
  Accumulation accumulation = Accumulation::kPlain;
  size_t stack_bytes = 192 << 10;                       // bytes for each CUDA thread
  int64_t max_steps = int64_t(2) * 1000 * 1000 * 1000;  // instructions of one cluster, after which it counts as hung
};

inline constexpr int kSm90 = 90;  // the architecture that brought TMA, wgmma and clusters

// Returns the bytes of dynamic shared memory that one block may ask for.
inline uint32_t max_shared_bytes(int arch) {
  switch (arch) {
    case 80:
    case 87:
      return 163 << 10;
    case 86:
    case 89:
    case 120:
      return 99 << 10;
    default:
      return 227 << 10;
  }
}

}  // namespace ffpa::emu
