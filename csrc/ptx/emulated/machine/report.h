// The findings of a run: errors, bank conflicts by source line, and counters.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ptx/emulated/machine/call_site.h"

namespace ffpa::emu {

// Kinds of errors:
//   race         unordered accesses to shared memory, a missing wait, __syncwarp or proxy fence; global memory that one
//                block wrote and another accesses, or that a TMA store writes
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
  std::string message;
  std::string file;
  int line = 0;
  int64_t count = 1;  // how often it occurred; the message describes the first time
};

// Wavefronts of one source instruction in shared memory; the ideal is what the same bytes need without conflicts.
struct BankConflicts {
  const char* instruction;
  CallSite site;
  int64_t executions = 0;
  int64_t wavefronts = 0;
  int64_t ideal_wavefronts = 0;
  int worst_way = 0;  // most distinct words of one bank in one wavefront group
};

struct Counters {
  int64_t blocks = 0;
  int64_t mma = 0;    // mma.sync; a wgmma counts one per 16×8×16 product
  int64_t wgmma = 0;  // wgmma instructions, counted per warp
  int64_t ldmatrix = 0;
  int64_t stmatrix = 0;
  int64_t shuffles = 0;
  int64_t barriers = 0;      // completed rounds of bar.sync / sync_block
  int64_t async_copies = 0;  // cp.async instructions, counted per lane
  int64_t tma_loads = 0;
  int64_t tma_stores = 0;
  int64_t bytes_global_to_shared = 0;  // read by cp.async and TMA, without filled zeros
  int64_t bytes_global_loaded = 0;     // read by ld.global
  int64_t bytes_global_stored = 0;     // written by st.global and TMA
  int64_t collectives = 0;
  int64_t context_switches = 0;

  void add(const Counters& other);
};

struct Report {
  std::vector<Error> errors;
  std::vector<BankConflicts> bank_conflicts;
  Counters counters;

  bool ok() const { return errors.empty(); }
  bool has(const std::string& kind) const;
  void merge(const Report& other);
  std::string summary() const;  // one line per error
};

}  // namespace ffpa::emu
