// Loads and stores of 2, 4, 8 and 16 bytes, in shared memory (32-bit addresses) and global memory (pointers). From
// global memory, single bytes can be loaded too; there is also an atomic addition on it.
//
// Addresses must be multiples of the access size. Values of 8 and 16 bytes are arrays of 32-bit registers, lowest
// address first.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "ptx/native/call_site.cuh"

namespace ffpa::ptx {

// ld.shared / st.shared, "Data Movement and Conversion Instructions: ld, st". They are volatile with a memory clobber
// because the compiler does not know that these addresses alias the targets of cp.async and ldmatrix.
FFPA_DEVICE uint16_t ld_shared_2(uint32_t address) {
  uint16_t value;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}

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

FFPA_DEVICE void st_shared_2(uint32_t address, uint16_t value) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
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

// prefetch.global.L2: asks for the line that holds this address, which must be valid. Nothing waits for it.
FFPA_DEVICE void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

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

}  // namespace ffpa::ptx
