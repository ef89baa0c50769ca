// Emulated side of ptx/native/memory.cuh.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/memory_ops.h"

namespace ffpa::ptx {

inline uint16_t ld_shared_2(uint32_t address, emu::CallSite site = emu::CallSite()) {
  uint16_t value;
  emu::load_shared(&value, address, 2, site);
  return value;
}

inline uint32_t ld_shared_4(uint32_t address, emu::CallSite site = emu::CallSite()) {
  uint32_t value;
  emu::load_shared(&value, address, 4, site);
  return value;
}

inline void ld_shared_8(uint32_t (&value)[2], uint32_t address, emu::CallSite site = emu::CallSite()) {
  emu::load_shared(value, address, 8, site);
}

inline void ld_shared_16(uint32_t (&value)[4], uint32_t address, emu::CallSite site = emu::CallSite()) {
  emu::load_shared(value, address, 16, site);
}

inline void st_shared_2(uint32_t address, uint16_t value, emu::CallSite site = emu::CallSite()) {
  emu::store_shared(address, &value, 2, site);
}

inline void st_shared_4(uint32_t address, uint32_t value, emu::CallSite site = emu::CallSite()) {
  emu::store_shared(address, &value, 4, site);
}

inline void st_shared_8(uint32_t address, const uint32_t (&value)[2], emu::CallSite site = emu::CallSite()) {
  emu::store_shared(address, value, 8, site);
}

inline void st_shared_16(uint32_t address, const uint32_t (&value)[4], emu::CallSite site = emu::CallSite()) {
  emu::store_shared(address, value, 16, site);
}

inline uint8_t ld_global_1(const void* address, emu::CallSite site = emu::CallSite()) {
  uint8_t value;
  emu::load_global(&value, address, 1, site);
  return value;
}

inline uint16_t ld_global_2(const void* address, emu::CallSite site = emu::CallSite()) {
  uint16_t value;
  emu::load_global(&value, address, 2, site);
  return value;
}

inline uint32_t ld_global_4(const void* address, emu::CallSite site = emu::CallSite()) {
  uint32_t value;
  emu::load_global(&value, address, 4, site);
  return value;
}

inline void ld_global_8(uint32_t (&value)[2], const void* address, emu::CallSite site = emu::CallSite()) {
  emu::load_global(value, address, 8, site);
}

inline void ld_global_16(uint32_t (&value)[4], const void* address, emu::CallSite site = emu::CallSite()) {
  emu::load_global(value, address, 16, site);
}

inline void st_global_2(void* address, uint16_t value, emu::CallSite site = emu::CallSite()) {
  emu::store_global(address, &value, 2, site);
}

inline void st_global_4(void* address, uint32_t value, emu::CallSite site = emu::CallSite()) {
  emu::store_global(address, &value, 4, site);
}

inline void st_global_8(void* address, const uint32_t (&value)[2], emu::CallSite site = emu::CallSite()) {
  emu::store_global(address, value, 8, site);
}

inline void st_global_16(void* address, const uint32_t (&value)[4], emu::CallSite site = emu::CallSite()) {
  emu::store_global(address, value, 16, site);
}

inline uint32_t atom_add_global(void* address, uint32_t value, emu::CallSite site = emu::CallSite()) {
  return emu::add_global(address, value, site);
}

}  // namespace ffpa::ptx
