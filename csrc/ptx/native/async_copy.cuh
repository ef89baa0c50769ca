// cp.async: copies from global to shared memory that run beside the thread and end at a wait.
//
// The bytes are visible to the issuing thread after cp_async_wait_group, and to other threads only after a barrier that
// follows it. Instead, cp_async_mbarrier_arrive can make an mbarrier wait for them: it arrives when all copies that
// this thread has issued so far, in committed groups or not, have landed. A thread that has waited for that phase, the
// issuing one or another, sees the copies. It sees nothing else that the issuing thread did: ordinary stores and loads
// need an mbarrier_arrive of their own. Either way, a thread exits only when its copies have landed.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "ptx/native/call_site.cuh"

namespace ffpa::ptx {

// cp.async, "Data Movement and Conversion Instructions: cp.async". `.cg` caches in L2 only: a tile is read once per
// block, so L1 is better left to others. `.L2::128B` asks L2 to fetch whole lines: rows are read to their end anyway.
// The copy writes 16 bytes; the bytes from `source_bytes` on (0 … 16) are zero, and are not read.
FFPA_DEVICE void cp_async_16(uint32_t destination_smem, const void* source_gmem, int source_bytes = 16,
                             CallSite = CallSite()) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination_smem), "l"(source_gmem),
               "r"(source_bytes)
               : "memory");
}

// cp.async with ignore-src: where `exists` is false the destination becomes zeros and the source is not read. This
// costs one predicate, while a source size costs the arithmetic of another address.
FFPA_DEVICE void cp_async_16_or_zero(bool exists, uint32_t destination_smem, const void* source_gmem,
                                     CallSite = CallSite()) {
  asm volatile(
      "{\n"
      "  .reg .pred missing;\n"
      "  setp.eq.b32 missing, %0, 0;\n"
      "  cp.async.cg.shared.global.L2::128B [%1], [%2], 16, missing;\n"
      "}" ::"r"(static_cast<int>(exists)),
      "r"(destination_smem), "l"(source_gmem)
      : "memory");
}

// Only `.ca` exists for 4 bytes.
FFPA_DEVICE void cp_async_4(uint32_t destination_smem, const void* source_gmem, int source_bytes = 4) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination_smem), "l"(source_gmem),
               "r"(source_bytes)
               : "memory");
}

// cp.async.commit_group: closes the group of all copies this thread has issued since the last one (maybe none).
FFPA_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: waits until at most `kPending` of the thread's latest groups are still in flight.
template <int kPending>
FFPA_DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// cp.async.wait_all: also covers copies that no group was committed for.
FFPA_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// cp.async.mbarrier.arrive, "Parallel Synchronization and Communication Instructions: cp.async.mbarrier.arrive".
// `.noinc`: the arrival is one of those that mbarrier_init counts; without it the barrier would expect one more.
FFPA_DEVICE void cp_async_mbarrier_arrive(uint32_t barrier_smem) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier_smem) : "memory");
}

}  // namespace ffpa::ptx
