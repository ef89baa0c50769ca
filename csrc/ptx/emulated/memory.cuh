// Emulated side of ptx/native/memory.cuh.
#pragma once

#include <cstdint>

#include "ptx/emulated/call_site.cuh"

namespace ffpa::ptx {

uint16_t ld_shared_2(uint32_t address, CallSite site = CallSite());
uint32_t ld_shared_4(uint32_t address, CallSite site = CallSite());
void ld_shared_8(uint32_t (&value)[2], uint32_t address, CallSite site = CallSite());
void ld_shared_16(uint32_t (&value)[4], uint32_t address, CallSite site = CallSite());

void st_shared_2(uint32_t address, uint16_t value, CallSite site = CallSite());
void st_shared_4(uint32_t address, uint32_t value, CallSite site = CallSite());
void st_shared_8(uint32_t address, const uint32_t (&value)[2], CallSite site = CallSite());
void st_shared_16(uint32_t address, const uint32_t (&value)[4], CallSite site = CallSite());

uint8_t ld_global_1(const void* address, CallSite site = CallSite());
uint16_t ld_global_2(const void* address, CallSite site = CallSite());
uint32_t ld_global_4(const void* address, CallSite site = CallSite());
void ld_global_8(uint32_t (&value)[2], const void* address, CallSite site = CallSite());
void ld_global_16(uint32_t (&value)[4], const void* address, CallSite site = CallSite());

inline void prefetch_l2(const void*) {}

void st_global_2(void* address, uint16_t value, CallSite site = CallSite());
void st_global_4(void* address, uint32_t value, CallSite site = CallSite());
void st_global_8(void* address, const uint32_t (&value)[2], CallSite site = CallSite());
void st_global_16(void* address, const uint32_t (&value)[4], CallSite site = CallSite());

uint32_t atom_add_global(void* address, uint32_t value, CallSite site = CallSite());

}  // namespace ffpa::ptx
