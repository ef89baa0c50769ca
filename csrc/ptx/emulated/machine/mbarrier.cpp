#include "ptx/emulated/instructions.cuh"

namespace ffpa::emu {
namespace {

constexpr uint32_t kMbarrierBytes = 8;
constexpr char kClusterWait[] = "barrier.cluster.wait";

void complete_phase_if_due(Mbarrier& barrier) {
  if (barrier.pending_arrivals || barrier.pending_bytes) return;
  barrier.phase ^= 1;
  ++barrier.completed_phases;
  barrier.pending_arrivals = barrier.expected_arrivals;
  barrier.completed = barrier.arriving;
  for (Warp* warp : machine->warps) {
    for (Lane* lane : warp->lanes) {
      const bool waits_here = lane->waiting_mbarrier == &barrier && lane->waiting_parity != barrier.phase;
      if (waits_here) wake(*warp, 1u << lane->index);
    }
  }
}

// Returns the barrier at this address, which must expect one more arrival.
Mbarrier& find_open_mbarrier(uint32_t address, const Instruction& instruction) {
  Mbarrier& barrier = find_mbarrier(address, instruction);
  if (barrier.pending_arrivals == barrier.copy_arrivals.size()) {
    fail("mbarrier", instruction.site, "more than %u arrivals in one phase", barrier.expected_arrivals);
  }
  return barrier;
}

// Lands the copies when the phase waits for nothing else: as late as can be, as TMA loads do.
void land_copies_if_due(Mbarrier& barrier) {
  if (barrier.copy_arrivals.empty() || barrier.pending_arrivals != barrier.copy_arrivals.size()) return;
  machine->async_work.push_back([&barrier] {
    for (const CopyArrival& arrival : barrier.copy_arrivals) {
      land_tracked_copies(*arrival.lane, arrival.time);
      uint32_t& known = barrier.arriving.at[copies_of(arrival.lane->warp->cluster_id)];
      known = std::max(known, arrival.time);
    }
    barrier.pending_arrivals = 0;
    barrier.copy_arrivals.clear();
    complete_phase_if_due(barrier);
  });
}

void arrive(uint32_t address, uint32_t expected_bytes, CallSite site) {
  Mbarrier& barrier = find_open_mbarrier(address, {"mbarrier.arrive", site});
  Warp& warp = *current->warp;
  if (has_exited(*barrier.block)) {
    fail("cluster", site, "mbarrier.arrive in block rank %d, which has exited", barrier.block->rank);
  }
  barrier.pending_bytes += expected_bytes;
  --barrier.pending_arrivals;
  barrier.arriving.join(warp.clock);
  ++warp.clock.at[warp.cluster_id];
  land_copies_if_due(barrier);
  complete_phase_if_due(barrier);
  maybe_preempt();
}

}  // namespace

Mbarrier& find_mbarrier(uint32_t address, const Instruction& instruction) {
  const CallSite site = instruction.site;
  count_step(site);
  Block& block = block_of(address);
  shared_pointer({block, address, kMbarrierBytes}, kMbarrierBytes, instruction);
  const auto entry = block.mbarriers.find(address & kOffsetMask);
  if (entry == block.mbarriers.end()) {
    fail("mbarrier", site, "%s: there is no initialised mbarrier at 0x%x", instruction.name, address & kOffsetMask);
  }
  Mbarrier& barrier = entry->second;
  const Warp& warp = *current->warp;
  if (barrier.initialising_warp != warp.cluster_id &&
      barrier.initialised_at > warp.clock.at[barrier.initialising_warp]) {
    report_error("race", site, "mbarrier used at %s without a barrier after its initialisation",
                 to_string(site).c_str());
  }
  return barrier;
}

bool has_exited(const Block& block) {
  return std::none_of(block.warps.begin(), block.warps.end(), [](const Warp& warp) { return warp.alive != 0; });
}

void complete_bytes(Block& block, uint32_t barrier, uint32_t bytes, const VectorClock& issuer, uint32_t landed_at) {
  Mbarrier& at = block.mbarriers[barrier & kOffsetMask];
  at.arriving.join(issuer);
  at.arriving.at[kAsyncAgent] = landed_at;
  at.pending_bytes -= bytes;
  complete_phase_if_due(at);
}

uint32_t remote_address(uint32_t address, uint32_t rank, CallSite site) {
  require_sm90({"mapa", site});
  if (rank >= machine->blocks.size()) {
    fail("cluster", site, "mapa: there is no block rank %u in this cluster", rank);
  }
  return (address & kOffsetMask) | (rank + 1) << 24;
}

}  // namespace ffpa::emu

namespace ffpa::ptx {
using namespace emu;

void mbarrier_init(uint32_t barrier_smem, uint32_t arrivals, CallSite site) {
  const Warp& warp = *current->warp;
  const SharedRange range{*current->block, barrier_smem, kMbarrierBytes};
  shared_pointer(range, kMbarrierBytes, {"mbarrier.init", site});
  if (arrivals == 0) fail("mbarrier", site, "mbarrier.init with 0 arrivals");
  note_write(range, *current, site);
  Mbarrier barrier;
  barrier.block = current->block;
  barrier.offset = barrier_smem & kOffsetMask;
  barrier.expected_arrivals = barrier.pending_arrivals = arrivals;
  barrier.initialising_warp = warp.cluster_id;
  barrier.initialised_at = warp.clock.at[warp.cluster_id];
  barrier.block->mbarriers[barrier.offset] = barrier;
}

void mbarrier_arrive(uint32_t barrier_smem, CallSite site) { arrive(barrier_smem, 0, site); }

void mbarrier_arrive_remote(uint32_t barrier_smem, uint32_t rank, CallSite site) {
  arrive(remote_address(barrier_smem, rank, site), 0, site);
}

void mbarrier_arrive_expect_tx(uint32_t barrier_smem, uint32_t bytes, CallSite site) {
  require_sm90({"mbarrier.arrive.expect_tx", site});
  arrive(barrier_smem, bytes, site);
}

// The arrival makes only the copies known: the manual does not order the thread's other accesses before it.
void cp_async_mbarrier_arrive(uint32_t barrier_smem, CallSite site) {
  Mbarrier& barrier = find_open_mbarrier(barrier_smem, {"cp.async.mbarrier.arrive", site});
  barrier.copy_arrivals.push_back({current, current->copy_time++});
  land_copies_if_due(barrier);
  maybe_preempt();
}

void mbarrier_wait(uint32_t barrier_smem, uint32_t parity, CallSite site) {
  const Mbarrier& barrier = find_mbarrier(barrier_smem, {"mbarrier.test_wait", site});
  Lane& lane = *current;
  const int64_t phases_before = barrier.completed_phases;
  while (barrier.phase == parity) {
    lane.waiting_mbarrier = &barrier;
    lane.waiting_parity = parity;
    block_lane({"mbarrier.wait", site});
    lane.waiting_mbarrier = nullptr;
  }
  const int64_t phases = barrier.completed_phases - phases_before;
  if (phases > 1) {
    report_error("mbarrier", site,
                 "the waiter at %s slept through %lld phases: on a GPU its parity may never come again",
                 to_string(site).c_str(), (long long)phases);
  }
  lane.warp->clock.join(barrier.completed);
  maybe_preempt();
}

void cluster_arrive(CallSite site) {
  sm90_collective({"barrier.cluster.arrive", site}, nullptr, [&](Warp& warp) {
    if (warp.cluster_arrivals != warp.cluster_waits) {
      fail("cluster", site, "barrier.cluster.arrive twice without a wait between");
    }
    ++warp.cluster_arrivals;
    machine->cluster_arriving.join(warp.clock);
    warp.advance();
    if (++machine->cluster_arrived_warps < int(machine->warps.size())) return;
    machine->cluster_arrived_warps = 0;
    ++machine->cluster_rounds;
    machine->cluster_completed = machine->cluster_arriving;
    for (Warp* other : machine->warps) {
      const bool sleeps_in_wait = !other->ready && other->arrived == 0 && other->op.name == kClusterWait;
      if (sleeps_in_wait) wake(*other, kAllLanes);
    }
  });
}

void cluster_wait(CallSite site) {
  const Instruction instruction{kClusterWait, site};
  require_sm90(instruction);
  Warp& warp = *current->warp;
  if (arrive_at_collective(instruction, nullptr)) {
    if (warp.cluster_arrivals == warp.cluster_waits) fail("cluster", site, "barrier.cluster.wait without an arrive");
    if (machine->cluster_rounds >= warp.cluster_arrivals) {
      leave_collective();
    } else {
      block_lane(instruction);
    }
  }
  // Every lane comes through here; the first one records the wait for its warp.
  if (warp.cluster_waits == warp.cluster_arrivals) return;
  warp.cluster_waits = warp.cluster_arrivals;
  warp.clock.join(machine->cluster_completed);
  ++warp.sync_epoch;
}

bool elect_one(CallSite site) {
  sm90_collective({"elect.sync", site}, nullptr, [](Warp&) {});
  // The leader is the same for a whole run, but it need not be lane 0.
  const int leader = machine->random_schedule() ? int(machine->options.seed % kWarpSize) : 0;
  return current->index == leader;
}

}  // namespace ffpa::ptx
