// Loads and stores of one lane, and cp.async.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/bulk_store.h"
#include "ptx/emulated/machine/call_site.h"
#include "ptx/emulated/machine/global_memory.h"

namespace ffpa::emu {

struct Lane;

// Fails unless the current lane may access these bytes of global memory.
void check_global(const void* address, uint32_t bytes, uint32_t alignment, Access access, GlobalProxy proxy,
                  const char* what, CallSite site);

void load_shared(void* value, uint32_t address, uint32_t bytes, CallSite site);
void store_shared(uint32_t address, const void* value, uint32_t bytes, CallSite site);

void load_global(void* value, const void* address, uint32_t bytes, CallSite site);
void store_global(void* address, const void* value, uint32_t bytes, CallSite site);
uint32_t add_global(void* address, uint32_t value, CallSite site);

// Writes `bytes` bytes, of which the bytes from `source_bytes` on are zero.
void copy_async(uint32_t destination, const void* source, int bytes, int source_bytes, CallSite site);
void commit_copies();
void wait_for_copies(int pending_groups);
void wait_for_all_copies();

// mbarriers call this to complete the lane's copies up to this time (PendingCopy::time). Its own waits may still come.
void land_tracked_copies(Lane& lane, uint32_t time);

}  // namespace ffpa::emu
