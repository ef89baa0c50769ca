// This file has loads and stores of 4, 8 and 16 bytes, in shared memory (32-bit addresses) and global memory
// (pointers), where there are also those of 2 bytes, loads of single bytes, atomic additions, and flags for other
// blocks.
//
// Addresses must be multiples of the access size. Values of 8 and 16 bytes are arrays of 32-bit registers, lowest
// address first.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "ptx/call_site.h"

namespace ffpa::ptx {

// ld.shared / st.shared, "Data Movement and Conversion Instructions: ld, st". They are volatile with a memory clobber
// because the compiler does not know that these addresses alias the targets of cp.async and ldmatrix.
FFPA_DEVICE uint32_t ld_shared_4(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

FFPA_DEVICE void ld_shared_8(uint32_t (&value)[2], uint32_t address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(value[0]), "=r"(value[1]) : "r"(address) : "memory");
}

FFPA_DEVICE void ld_shared_16(uint32_t (&value)[4], uint32_t address, CallSite = CallSite()) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "r"(address)
               : "memory");
}

FFPA_DEVICE void st_shared_4(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

FFPA_DEVICE void st_shared_8(uint32_t address, const uint32_t (&value)[2]) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(value[0]), "r"(value[1]) : "memory");
}

FFPA_DEVICE void st_shared_16(uint32_t address, const uint32_t (&value)[4], CallSite = CallSite()) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value[0]), "r"(value[1]), "r"(value[2]),
               "r"(value[3])
               : "memory");
}

// ld.global / st.global. The loads are volatile asm so that one that follows a fence is not moved before it.
FFPA_DEVICE uint8_t ld_global_1(const void* address) {
  uint32_t value;  // there are no registers of 8 bits
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return uint8_t(value);
}

FFPA_DEVICE uint16_t ld_global_2(const void* address) {
  uint16_t value;
  asm volatile("ld.global.b16 %0, [%1];" : "=h"(value) : "l"(address) : "memory");
  return value;
}

FFPA_DEVICE uint32_t ld_global_4(const void* address) {
  uint32_t value;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

FFPA_DEVICE void ld_global_8(uint32_t (&value)[2], const void* address) {
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(value[0]), "=r"(value[1]) : "l"(address) : "memory");
}

FFPA_DEVICE void ld_global_16(uint32_t (&value)[4], const void* address, CallSite = CallSite()) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "l"(address)
               : "memory");
}

// prefetch: brings the line of an address into the L2 cache.
FFPA_DEVICE void prefetch_global(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

FFPA_DEVICE void st_global_2(void* address, uint16_t value) {
  asm volatile("st.global.b16 [%0], %1;" ::"l"(address), "h"(value) : "memory");
}

FFPA_DEVICE void st_global_4(void* address, uint32_t value) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

FFPA_DEVICE void st_global_8(void* address, const uint32_t (&value)[2]) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(value[0]), "r"(value[1]) : "memory");
}

FFPA_DEVICE void st_global_16(void* address, const uint32_t (&value)[4], CallSite = CallSite()) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value[0]), "r"(value[1]), "r"(value[2]),
               "r"(value[3])
               : "memory");
}

// atom.add: returns what was there before. It is relaxed: it orders nothing else.
FFPA_DEVICE uint32_t atom_add_global(void* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

// red.max.s32 and red.min.u32: relaxed, as atom.add above, and without an answer. Floats are in order as signed words
// where the new one is not negative, and in reverse order as unsigned ones where it is.
FFPA_DEVICE void red_max_signed_global(void* address, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.max.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
FFPA_DEVICE void red_min_global(void* address, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.min.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Blocks of one launch tell each other what they have done, and wait, by flags and counters in global memory.
//
// What a thread knows of when it releases is known to whoever acquires what the release has written, or what additions
// have made of it. A thread knows what it has done, and what others of its block did before a barrier. One thread waits
// for its block, a barrier follows. What TMA writes takes part once bulk_wait_group has returned; what TMA is to read,
// or to add to, needs a fence_proxy_async_global besides, on either side.
//
// A block may wait for one that has begun before it. Which one has is known only from a counter that blocks take their
// numbers from; in a cooperative launch (LaunchShape) all may wait for all.

// ld.acquire.gpu, "Memory Consistency Model: Release and Acquire Patterns". `.gpu` covers all blocks of the launch.
FFPA_DEVICE uint32_t ld_acquire_global_4(const void* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Waits with ld.acquire.gpu until the word is `value` or larger. No kernel spins in another way: the emulator lets
// other blocks run here.
FFPA_DEVICE void wait_global_at_least(const void* address, uint32_t value) {
  while (ld_acquire_global_4(address) < value) {
  }
}

// st.release.gpu: stores the value and releases.
FFPA_DEVICE void st_release_global_4(void* address, uint32_t value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// red.release.gpu.add: adds the value and releases.
FFPA_DEVICE void red_add_release_global(void* address, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// atom.acq_rel.gpu.add: returns what was there before. Whoever comes last knows what all before it have done.
FFPA_DEVICE uint32_t atom_add_acq_rel_global(void* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

// fence.acq_rel.gpu: makes an atom_add_global after it a release, and one before it an acquire.
FFPA_DEVICE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// cp.async: copies from global to shared memory that run beside the thread and end at a wait.
//
// The bytes are visible to the issuing thread after cp_async_wait_group, and to other threads only after a barrier that
// follows it. Instead, cp_async_mbarrier_arrive can make an mbarrier wait for them: it arrives when all copies that
// this thread has issued so far, in committed groups or not, have landed. A thread that has waited for that phase, the
// issuing one or another, sees the copies. It sees nothing else that the issuing thread did: ordinary stores and loads
// need an mbarrier_arrive of their own. Either way, a thread exits only when its copies have landed.

// cp.async with ignore-src, "Data Movement and Conversion Instructions: cp.async": copies 16 bytes; where `exists` is
// false the destination becomes zeros and the source is not read. This costs one predicate, while a source size costs
// the arithmetic of another address. `.cg` caches in L2 only: a tile is read once per block, so L1 is better left to
// others. `.L2::128B` asks L2 to fetch whole lines: rows are read to their end anyway.
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

// cp.async.commit_group: closes the group of all copies this thread has issued since the last one (maybe none).
FFPA_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: waits until at most `kPending` of the thread's latest groups are still in flight.
template <int kPending>
FFPA_DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// cp.async.mbarrier.arrive, "Parallel Synchronization and Communication Instructions: cp.async.mbarrier.arrive".
// `.noinc`: the arrival is one of those that mbarrier_init counts; without it the barrier would expect one more.
FFPA_DEVICE void cp_async_mbarrier_arrive(uint32_t barrier_smem) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier_smem) : "memory");
}

}  // namespace ffpa::ptx
