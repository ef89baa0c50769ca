#include "ptx/emulated/machine/warp_ops.h"

#include "ptx/emulated/machine/collective.h"

namespace ffpa::emu {
namespace {

struct ShuffleArguments {
  uint32_t value;
  int argument;
  uint32_t result;
};

int source_lane(Shuffle kind, int lane, int argument) {
  if (kind == Shuffle::kIndex) return argument & (kWarpSize - 1);
  const int source = lane ^ argument;
  return source >= 0 && source < kWarpSize ? source : lane;
}

void release(Block& block, NamedBarrier& barrier) {
  for (Warp& warp : block.warps) {
    if (!(barrier.waiting_warps >> warp.index & 1)) continue;
    warp.clock.join(barrier.clock);
    ++warp.clock.at[warp.cluster_id];
    ++warp.sync_epoch;
    wake(warp, kAllLanes);
  }
  barrier = NamedBarrier{};
  ++machine->report.counters.barriers;
}

void barrier_round(WarpOp op, int index, int threads, CallSite site) {
  collective(op, nullptr, site, [&](Warp& warp) {
    const bool waits = op == WarpOp::kBarSync;
    Block& block = *warp.block;
    const int expected = threads == kWholeBlock ? block.threads : threads;
    if (index < 0 || index > 15 || expected <= 0 || expected % kWarpSize || expected > block.threads) {
      fail("barrier", site,
           format("barrier %d with %d threads; the index must be 0 to 15, the count a multiple of 32 up to %d", index,
                  expected, block.threads));
    }
    NamedBarrier& barrier = block.barriers[index];
    if (barrier.arrived_threads && barrier.expected_threads != expected) {
      fail(
          "barrier", site,
          format("barrier %d with %d threads, others in this round use %d", index, expected, barrier.expected_threads));
    }
    if (barrier.waiting_warps >> warp.index & 1) fail("barrier", site, "this warp arrives twice in one round");
    barrier.expected_threads = expected;
    barrier.arrived_threads += kWarpSize;
    barrier.clock.join(warp.clock);
    if (waits) {
      barrier.waiting_warps |= uint64_t(1) << warp.index;
    } else {
      ++warp.clock.at[warp.cluster_id];
      ++warp.sync_epoch;
    }
    if (barrier.arrived_threads < expected) return waits ? After::kSleep : After::kContinue;
    release(block, barrier);
    return After::kContinue;
  });
}

}  // namespace

uint32_t shuffle(Shuffle kind, uint32_t value, int argument, CallSite site) {
  ShuffleArguments arguments{value, argument, 0};
  collective(WarpOp::kShuffle, &arguments, site, [&](Warp& warp) {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      auto& mine = arguments_of<ShuffleArguments>(warp, lane);
      mine.result = arguments_of<ShuffleArguments>(warp, source_lane(kind, lane, mine.argument)).value;
    }
    ++machine->report.counters.shuffles;
    return After::kContinue;
  });
  return arguments.result;
}

uint32_t ballot(bool predicate, CallSite site) {
  struct Arguments {
    bool predicate;
    uint32_t result;
  } arguments{predicate, 0};
  collective(WarpOp::kVote, &arguments, site, [&](Warp& warp) {
    uint32_t votes = 0;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      votes |= uint32_t(arguments_of<Arguments>(warp, lane).predicate) << lane;
    }
    for (int lane = 0; lane < kWarpSize; ++lane) arguments_of<Arguments>(warp, lane).result = votes;
    return After::kContinue;
  });
  return arguments.result;
}

void sync_warp(CallSite site) {
  collective(WarpOp::kSyncWarp, nullptr, site, [](Warp& warp) {
    ++warp.sync_epoch;
    return After::kContinue;
  });
}

void barrier_sync(int barrier, int threads, CallSite site) { barrier_round(WarpOp::kBarSync, barrier, threads, site); }

void barrier_arrive(int barrier, int threads, CallSite site) {
  barrier_round(WarpOp::kBarArrive, barrier, threads, site);
}

}  // namespace ffpa::emu
