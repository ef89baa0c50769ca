// Functions of mbarriers and of the cluster barrier.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/call_site.h"
#include "ptx/emulated/machine/vector_clock.h"

namespace ffpa::emu {

struct Block;

void mbarrier_init(uint32_t address, uint32_t arrivals, CallSite site);
void mbarrier_arrive(uint32_t address, CallSite site);
void mbarrier_arrive_expect_bytes(uint32_t address, uint32_t bytes, CallSite site);
void mbarrier_arrive_after_copies(uint32_t address, CallSite site);  // stands for cp.async.mbarrier.arrive.noinc
void mbarrier_wait(uint32_t address, uint32_t parity, CallSite site);

// The TMA unit checks that the barrier exists when it issues a copy, and completes bytes when the copy has landed.
void require_mbarrier(uint32_t address, const char* instruction, CallSite site);
void mbarrier_complete_bytes(Block& block, uint32_t address, uint32_t bytes, const VectorClock& issuer,
                             uint32_t landed_at);

void cluster_arrive(CallSite site);
void cluster_wait(CallSite site);
bool elect_one(CallSite site);
uint32_t remote_address(uint32_t address, uint32_t rank, CallSite site);  // stands for mapa
bool has_exited(const Block& block);

}  // namespace ffpa::emu
