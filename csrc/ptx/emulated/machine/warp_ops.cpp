#include "ptx/emulated/instructions.cuh"

namespace ffpa::emu {
namespace {

void release(Block& block, NamedBarrier& barrier) {
  for (Warp& warp : block.warps) {
    if (!(barrier.waiting_warps >> warp.index & 1)) continue;
    warp.clock.join(barrier.clock);
    warp.advance();
    wake(warp, kAllLanes);
  }
  barrier = NamedBarrier{};
  ++machine->report.counters.barriers;
}

// Arrives for the warp, which sleeps until the round is complete if it `waits`.
void barrier_round(const Instruction& op, bool waits, int index, int expected) {
  if (!arrive_at_collective(op, nullptr)) return;
  Warp& warp = *current->warp;
  Block& block = *warp.block;
  if (index < 0 || index > 15 || expected <= 0 || expected % kWarpSize || expected > block.threads) {
    fail("barrier", op.site,
         "barrier %d with %d threads; the index must be 0 to 15, the count a multiple of 32 up to %d", index, expected,
         block.threads);
  }
  NamedBarrier& barrier = block.barriers[index];
  if (barrier.arrived_threads && barrier.expected_threads != expected) {
    fail("barrier", op.site, "barrier %d with %d threads, others in this round use %d", index, expected,
         barrier.expected_threads);
  }
  if (barrier.waiting_warps >> warp.index & 1) fail("barrier", op.site, "this warp arrives twice in one round");
  barrier.expected_threads = expected;
  barrier.arrived_threads += kWarpSize;
  barrier.clock.join(warp.clock);
  if (waits) {
    barrier.waiting_warps |= uint64_t(1) << warp.index;
  } else {
    warp.advance();
  }
  const bool complete = barrier.arrived_threads >= expected;
  if (complete) release(block, barrier);
  if (complete || !waits) {
    leave_collective();
  } else {
    block_lane(op);
  }
}

}  // namespace

bool arrive_at_collective(const Instruction& op, void* arguments) {
  Lane& lane = *current;
  Warp& warp = *lane.warp;
  count_step(op.site);
  if (!warp.arrived) {
    warp.op = op;
  } else if (!(warp.op == op)) {
    fail("divergence", op.site, "this lane executes %s while lanes %08x of its warp wait in %s at %s", op.name,
         warp.arrived, warp.op.name, to_string(warp.op.site).c_str());
  }
  warp.arguments[lane.index] = arguments;
  warp.arrived |= 1u << lane.index;
  if (warp.arrived != kAllLanes) {
    block_lane(op);
    return false;
  }
  warp.arrived = 0;
  flush_access_logs(warp);
  return true;
}

void leave_collective() {
  wake(*current->warp, kAllLanes);
  maybe_preempt();
}

const uint32_t* exchange(uint32_t value, const Instruction& op) {
  collective(op, &value, [](Warp& warp) {
    for (int lane = 0; lane < kWarpSize; ++lane) warp.exchanged[lane] = arguments_of<uint32_t>(warp, lane);
  });
  return current->warp->exchanged;
}

}  // namespace ffpa::emu

namespace ffpa::ptx {
using namespace emu;

uint32_t vote_ballot(bool predicate, CallSite site) {
  const uint32_t* predicates = exchange(predicate, {"vote.sync", site});
  uint32_t votes = 0;
  for (int lane = 0; lane < kWarpSize; ++lane) votes |= predicates[lane] << lane;
  return votes;
}

void sync_warp(CallSite site) {
  collective({"bar.warp.sync", site}, nullptr, [](Warp& warp) { ++warp.sync_epoch; });
}

void bar_sync(int barrier, int threads, CallSite site) { barrier_round({"bar.sync", site}, true, barrier, threads); }
void bar_arrive(int barrier, int threads, CallSite site) {
  barrier_round({"bar.arrive", site}, false, barrier, threads);
}

}  // namespace ffpa::ptx
