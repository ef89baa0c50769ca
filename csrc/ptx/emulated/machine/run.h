// What a program around the emulator needs: the options of its launches, and what they found, which is errors, bank
// conflicts by source line, and counters.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "ptx/call_site.h"
#include "ptx/emulated/machine/global_memory.h"

namespace ffpa::emu {

using ptx::CallSite;

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

// Returns "file.cuh:123", without directories.
std::string to_string(CallSite site);

// Works as printf does, into a string.
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
std::string format(const char* pattern, va_list values);

// This says which instruction of a kernel is meant. Each name is one constant, so names are compared by address.
struct Instruction {
  const char* name;
  CallSite site;

  bool operator==(const Instruction& other) const { return name == other.name && site == other.site; }
  bool operator<(const Instruction& other) const {
    return std::tie(site.file, site.line, name) < std::tie(other.site.file, other.site.line, other.name);
  }
};

// Kinds of errors:
//   race         unordered accesses to shared memory, or of two clusters to global memory; a missing wait, __syncwarp
//   or
//                proxy fence; global memory that a TMA store writes
//   divergence   lanes of one warp at different collectives
//   deadlock     nobody can go on
//   hang         Options::max_steps exceeded
//   barrier, mbarrier, wgmma, tma, cluster, setmaxnreg   misuse of that instruction
//   misaligned, smem-oob, gmem-oob                        bad addresses
//   gmem-readonly  a store to a range registered as read-only
//   exit         a thread or block ends with work in flight
//   unsupported  an instruction that Options::arch does not have
//   launch       a launch that no GPU would accept
//   segfault     the kernel used a plain pointer or overran its stack
struct Error {
  std::string kind;
  std::string key;  // tells errors of one kind apart
  std::string message;
  CallSite site;
  int64_t count = 1;  // how often it occurred; the message describes the first time
};

// Wavefronts of one source instruction in shared memory; the ideal is what the same bytes need without conflicts.
struct BankConflicts {
  int64_t executions = 0;
  int64_t wavefronts = 0;
  int64_t ideal_wavefronts = 0;
  int worst_way = 0;  // most distinct words of one bank in one wavefront group

  void add(const BankConflicts& other);
};

struct Counters {
  int64_t blocks = 0;
  int64_t mma = 0;                     // mma.sync; a wgmma counts one per 16×8×16 product
  int64_t wgmma = 0;                   // wgmma instructions, counted per warp
  int64_t barriers = 0;                // completed rounds of bar.sync / sync_block
  int64_t bytes_global_to_shared = 0;  // read by cp.async and TMA, without filled zeros
  int64_t bytes_global_loaded = 0;     // read by ld.global
  int64_t bytes_global_stored = 0;     // written by st.global and TMA

  void add(const Counters& other);
};

struct Report {
  std::vector<Error> errors;
  std::map<Instruction, BankConflicts> bank_conflicts;
  Counters counters;

  void add(const Error& error);  // errors of the same kind and key are counted, not repeated
  void merge(const Report& other);
  std::string summary() const;  // one line per error
};

// The options of all launches from now on.
void set_current_options(const Options& options);

// Returns the sum of the reports of all launches since the last call.
Report take_session_report();

}  // namespace ffpa::emu
