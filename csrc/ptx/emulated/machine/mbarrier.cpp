#include "ptx/emulated/machine/mbarrier.h"

#include <algorithm>

#include "ptx/emulated/machine/collective.h"
#include "ptx/emulated/machine/memory_ops.h"
#include "ptx/emulated/machine/shared_memory.h"

namespace ffpa::emu {
namespace {

constexpr uint32_t kMbarrierBytes = 8;

Mbarrier& find_mbarrier(uint32_t address, const char* instruction, CallSite site) {
  count_step(site);
  Block& block = block_of(address);
  shared_pointer(block, address, kMbarrierBytes, kMbarrierBytes, instruction, site);
  const auto entry = block.mbarriers.find(address & kOffsetMask);
  if (entry == block.mbarriers.end()) {
    fail("mbarrier", site, format("%s: there is no initialised mbarrier at 0x%x", instruction, address & kOffsetMask));
  }
  Mbarrier& barrier = entry->second;
  const Warp& warp = *current->warp;
  if (barrier.initialising_warp != warp.cluster_id &&
      barrier.initialised_at > warp.clock.at[barrier.initialising_warp]) {
    report_error("race", "mbarrier" + to_string(site), site,
                 format("mbarrier used at %s without a barrier after its initialisation", to_string(site).c_str()));
  }
  return barrier;
}

void complete_phase_if_due(Mbarrier& barrier, Block& block, uint32_t address) {
  if (barrier.pending_arrivals || barrier.pending_bytes) return;
  barrier.phase ^= 1;
  ++barrier.completed_phases;
  barrier.pending_arrivals = barrier.expected_arrivals;
  barrier.completed = barrier.arriving;
  for (Warp* warp : machine->warps) {
    for (Lane* lane : warp->lanes) {
      const bool waits_here =
          lane->waiting_mbarrier && (warp->alive >> lane->index & 1) && &block_of(lane->waiting_mbarrier) == &block &&
          (lane->waiting_mbarrier & kOffsetMask) == address && lane->waiting_parity != barrier.phase;
      if (waits_here) wake(*warp, 1u << lane->index);
    }
  }
}

// Returns the barrier at this address, which must expect one more arrival.
Mbarrier& find_open_mbarrier(uint32_t address, const char* instruction, CallSite site) {
  Mbarrier& barrier = find_mbarrier(address, instruction, site);
  if (barrier.pending_arrivals == barrier.copy_arrivals.size()) {
    fail("mbarrier", site, format("more than %u arrivals in one phase", barrier.expected_arrivals));
  }
  return barrier;
}

// Lands the copies when the phase waits for nothing else: as late as can be, as TMA loads do.
void land_copies_if_due(Mbarrier& barrier, Block& block, uint32_t address) {
  if (barrier.copy_arrivals.empty() || barrier.pending_arrivals != barrier.copy_arrivals.size()) return;
  machine->async_work.push_back([&block, address] {
    Mbarrier& barrier = block.mbarriers[address];
    for (const CopyArrival& arrival : barrier.copy_arrivals) {
      land_tracked_copies(*arrival.lane, arrival.time);
      uint32_t& known = barrier.arriving.at[copies_of(arrival.lane->warp->cluster_id)];
      known = std::max(known, arrival.time);
    }
    barrier.pending_arrivals = 0;
    barrier.copy_arrivals.clear();
    complete_phase_if_due(barrier, block, address);
  });
}

void arrive(uint32_t address, uint32_t expected_bytes, CallSite site) {
  Mbarrier& barrier = find_open_mbarrier(address, "mbarrier.arrive", site);
  Block& block = block_of(address);
  Warp& warp = *current->warp;
  if (has_exited(block)) {
    fail("cluster", site, format("mbarrier.arrive in block rank %d, which has exited", block.rank));
  }
  barrier.pending_bytes += expected_bytes;
  --barrier.pending_arrivals;
  barrier.arriving.join(warp.clock);
  ++warp.clock.at[warp.cluster_id];
  land_copies_if_due(barrier, block, address & kOffsetMask);
  complete_phase_if_due(barrier, block, address & kOffsetMask);
  maybe_preempt();
}

}  // namespace

bool has_exited(const Block& block) {
  return std::none_of(block.warps.begin(), block.warps.end(), [](const Warp& warp) { return warp.alive != 0; });
}

void mbarrier_init(uint32_t address, uint32_t arrivals, CallSite site) {
  Warp& warp = *current->warp;
  Block& block = *current->block;
  shared_pointer(block, address, kMbarrierBytes, kMbarrierBytes, "mbarrier.init", site);
  if (arrivals == 0) fail("mbarrier", site, "mbarrier.init with 0 arrivals");
  note_write(block, address, kMbarrierBytes, warp, current->index, site);
  Mbarrier barrier;
  barrier.expected_arrivals = barrier.pending_arrivals = arrivals;
  barrier.initialising_warp = warp.cluster_id;
  barrier.initialised_at = warp.clock.at[warp.cluster_id];
  block.mbarriers[address & kOffsetMask] = barrier;
}

void mbarrier_arrive(uint32_t address, CallSite site) { arrive(address, 0, site); }

void mbarrier_arrive_expect_bytes(uint32_t address, uint32_t bytes, CallSite site) {
  require_arch(kSm90, "mbarrier.arrive.expect_tx", site);
  arrive(address, bytes, site);
}

// The arrival makes only the copies known: the manual does not order the thread's other accesses before it.
void mbarrier_arrive_after_copies(uint32_t address, CallSite site) {
  Mbarrier& barrier = find_open_mbarrier(address, "cp.async.mbarrier.arrive", site);
  barrier.copy_arrivals.push_back({current, current->copy_time++});
  land_copies_if_due(barrier, block_of(address), address & kOffsetMask);
  maybe_preempt();
}

void mbarrier_wait(uint32_t address, uint32_t parity, CallSite site) {
  Mbarrier& barrier = find_mbarrier(address, "mbarrier.test_wait", site);
  Lane& lane = *current;
  const int64_t phases_before = barrier.completed_phases;
  const uint32_t rank_bits = address >> 24 ? 0 : uint32_t(lane.block->rank + 1) << 24;
  while (barrier.phase == parity) {
    lane.waiting_mbarrier = address | rank_bits;
    lane.waiting_parity = parity;
    block_lane("mbarrier.wait", site);
    lane.waiting_mbarrier = 0;
  }
  if (barrier.completed_phases - phases_before > 1) {
    report_error("mbarrier", to_string(site), site,
                 format("the waiter at %s slept through %lld phases: on a GPU its parity may never come again",
                        to_string(site).c_str(), (long long)(barrier.completed_phases - phases_before)));
  }
  lane.warp->clock.join(barrier.completed);
  maybe_preempt();
}

void require_mbarrier(uint32_t address, const char* instruction, CallSite site) {
  find_mbarrier(address, instruction, site);
}

void mbarrier_complete_bytes(Block& block, uint32_t address, uint32_t bytes, const VectorClock& issuer,
                             uint32_t landed_at) {
  Mbarrier& barrier = block.mbarriers[address & kOffsetMask];
  barrier.arriving.join(issuer);
  barrier.arriving.at[kAsyncAgent] = landed_at;
  barrier.pending_bytes -= bytes;
  complete_phase_if_due(barrier, block, address & kOffsetMask);
}

void cluster_arrive(CallSite site) {
  require_arch(kSm90, "barrier.cluster.arrive", site);
  collective(WarpOp::kClusterArrive, nullptr, site, [&](Warp& warp) {
    if (warp.cluster_arrivals != warp.cluster_waits) {
      fail("cluster", site, "barrier.cluster.arrive twice without a wait between");
    }
    ++warp.cluster_arrivals;
    machine->cluster_arriving.join(warp.clock);
    ++warp.clock.at[warp.cluster_id];
    ++warp.sync_epoch;
    if (++machine->cluster_arrived_warps == int(machine->warps.size())) {
      machine->cluster_arrived_warps = 0;
      ++machine->cluster_rounds;
      machine->cluster_completed = machine->cluster_arriving;
      for (Warp* other : machine->warps) {
        const bool sleeps_in_wait = !other->ready && other->arrived == 0 && other->op == WarpOp::kClusterWait;
        if (sleeps_in_wait) wake(*other, kAllLanes);
      }
    }
    return After::kContinue;
  });
}

void cluster_wait(CallSite site) {
  require_arch(kSm90, "barrier.cluster.wait", site);
  collective(WarpOp::kClusterWait, nullptr, site, [&](Warp& warp) {
    if (warp.cluster_arrivals == warp.cluster_waits) fail("cluster", site, "barrier.cluster.wait without an arrive");
    return machine->cluster_rounds >= warp.cluster_arrivals ? After::kContinue : After::kSleep;
  });
  // Every lane comes through here; the first one records the wait for its warp.
  Warp& warp = *current->warp;
  if (warp.cluster_waits == warp.cluster_arrivals) return;
  warp.cluster_waits = warp.cluster_arrivals;
  warp.clock.join(machine->cluster_completed);
  ++warp.sync_epoch;
}

bool elect_one(CallSite site) {
  require_arch(kSm90, "elect.sync", site);
  collective(WarpOp::kElect, nullptr, site, [](Warp&) { return After::kContinue; });
  // The leader is the same for a whole run, but it need not be lane 0.
  const int leader = machine->random_schedule() ? int(machine->options.seed % kWarpSize) : 0;
  return current->index == leader;
}

uint32_t remote_address(uint32_t address, uint32_t rank, CallSite site) {
  require_arch(kSm90, "mapa", site);
  if (rank >= machine->blocks.size()) {
    fail("cluster", site, format("mapa: there is no block rank %u in this cluster", rank));
  }
  return (address & kOffsetMask) | (rank + 1) << 24;
}

}  // namespace ffpa::emu
