#include "ptx/emulated/machine/run.h"

#include <sys/mman.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "base/math.h"
#include "ptx/emulated/machine/fault_guard.h"
#include "ptx/emulated/machine/scheduler.h"
#include "ptx/emulated/machine/wgmma.h"

namespace ffpa::emu {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kPoisonedStackBytes = 16 << 10;  // more than any kernel's frames take

// Allocates a stack with an unreadable page below it.
char* new_stack(size_t bytes) {
  void* memory =
      mmap(nullptr, bytes + kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, kPageBytes, PROT_NONE);
  return static_cast<char*>(memory) + kPageBytes;
}

void free_stack(char* stack, size_t bytes) { munmap(stack - kPageBytes, bytes + kPageBytes); }

void lane_entry() {
  finish_first_switch(machine->launcher.context);
  try {
    machine->kernel();
  } catch (const std::exception& problem) {
    fail("launch", CallSite("kernel", 0), format("an exception left the kernel: %s", problem.what()));
  }
  exit_lane();
}

void reset_block(Block& block, int rank, const Dim3& index) {
  const GridShape& shape = machine->shape;
  const Options& options = machine->options;
  block.index = index;
  block.rank = rank;
  block.threads = shape.threads;
  block.smem_bytes = shape.smem_bytes;
  block.smem.assign(shape.smem_bytes, options.poison ? 0xff : 0);
  block.mbarriers.clear();
  block.wgmma_history.assign(shape.threads / kWarpSize / 4, nullptr);
  for (NamedBarrier& barrier : block.barriers) barrier = NamedBarrier{};
  if (options.check_races) {
    const size_t words = ceil_div<size_t>(shape.smem_bytes, 4);
    const size_t warps_in_cluster = shape.cluster.count() * shape.threads / kWarpSize;
    block.shadow.assign(words, ShadowWord{});
    block.read_times.assign(words * warps_in_cluster, 0);
  }
}

void reset_warp(Warp& warp, Block& block, int index) {
  warp = Warp{};
  warp.index = index;
  warp.cluster_id = block.rank * int(block.warps.size()) + index;
  warp.block = &block;
  warp.alive = warp.ready = kAllLanes;
  warp.clock.at[warp.cluster_id] = 1;
  machine->warps.push_back(&warp);
  machine->ready_warps |= uint64_t(1) << warp.cluster_id;
}

void reset_lane(Lane& lane, char* stack, Warp& warp, int index) {
  lane = Lane{};
  lane.block = warp.block;
  lane.warp = &warp;
  lane.index = index;
  lane.thread = warp.index * kWarpSize + index;
  warp.lanes[index] = &lane;
  // Stacks whose tops are all page-aligned would compete for the same sets of the L1 cache (15 to 29% slower).
  const size_t stagger = size_t(&lane - machine->lanes.data()) % 61 * 1088;
  const size_t bytes = machine->options.stack_bytes - stagger;
  prepare(lane.context, stack, bytes, machine->options.poison ? kPoisonedStackBytes : 0, lane_entry);
}

uint64_t hash_seed(uint64_t seed, const Dim3& block) {
  const uint64_t hash = seed * 0x9E3779B97F4A7C15ull + (block.x + 1) * 0xD1B54A32D192ED03ull +
                        (block.y + 1) * 0x94D049BB133111EBull + (block.z + 1) * 0xBF58476D1CE4E5B9ull;
  return hash ? hash : 1;
}

void run_cluster(Machine& self, const Dim3& first_block) {
  const GridShape& shape = self.shape;
  const int block_count = int(shape.cluster.count());
  const int warps_per_block = shape.threads / kWarpSize;
  self.warps.clear();
  self.ready_warps = 0;
  self.running_warp = nullptr;
  self.given_up = false;
  self.steps = 0;
  self.async_work.clear();
  self.async_clock = VectorClock{};
  self.bulk_stores.clear();
  self.bulk_footprint.clear();
  self.cluster_arrived_warps = 0;
  self.cluster_rounds = 0;
  self.cluster_arriving = self.cluster_completed = VectorClock{};
  self.random_state = hash_seed(self.options.seed, first_block);
  self.lanes_alive = int64_t(block_count) * shape.threads;
  self.lanes.resize(self.lanes_alive);
  while (self.stacks.size() < self.lanes.size()) self.stacks.push_back(new_stack(self.options.stack_bytes));
  while (int(self.blocks.size()) < block_count) self.blocks.push_back(std::make_unique<Block>());

  for (int rank = 0; rank < block_count; ++rank) {
    Block& block = *self.blocks[rank];
    reset_block(block, rank,
                {first_block.x + rank % shape.cluster.x, first_block.y + rank / shape.cluster.x % shape.cluster.y,
                 first_block.z + rank / (shape.cluster.x * shape.cluster.y)});
    block.warps.resize(warps_per_block);
    for (int w = 0; w < warps_per_block; ++w) {
      reset_warp(block.warps[w], block, w);
      for (int l = 0; l < kWarpSize; ++l) {
        const size_t id = size_t(rank) * shape.threads + w * kWarpSize + l;
        reset_lane(self.lanes[id], self.stacks[id], block.warps[w], l);
      }
    }
  }
  run_lanes();
  self.report.counters.blocks += block_count;
  if (self.given_up) return;
  if (!self.async_work.empty()) {
    report_error("exit", "async", CallSite("kernel", 0),
                 "the kernel ends with TMA loads, or arrivals of cp.async, in flight");
  }
  finish_bulk_stores();
  for (const auto& block : self.blocks) check_wgmma_at_exit(*block);
}

// Runs on one OS thread: takes clusters until there are none left or somebody gives up.
Report run_clusters(const GridShape& shape, const std::function<void()>& kernel, const Options& options,
                    const GlobalRanges& global, std::atomic<int64_t>& next_cluster) {
  const Dim3 clusters{shape.grid.x / shape.cluster.x, shape.grid.y / shape.cluster.y, shape.grid.z / shape.cluster.z};
  FaultStack fault_stack;
  Machine self;
  self.options = options;
  self.global = global;
  self.shape = shape;
  self.kernel = kernel;
  machine = &self;
  for (int64_t i = next_cluster++; i < clusters.count(); i = next_cluster++) {
    self.cluster = uint32_t(i);
    run_cluster(self,
                {uint32_t(i % clusters.x) * shape.cluster.x, uint32_t(i / clusters.x % clusters.y) * shape.cluster.y,
                 uint32_t(i / clusters.x / clusters.y) * shape.cluster.z});
    if (self.given_up) next_cluster = clusters.count();
  }
  machine = nullptr;
  for (char* stack : self.stacks) free_stack(stack, options.stack_bytes);
  for (const auto& [key, conflicts] : self.bank_conflicts) self.report.bank_conflicts.push_back(conflicts);
  return self.report;
}

std::string problem_with(const GridShape& shape, const Options& options) {
  if (shape.threads <= 0 || shape.threads % kWarpSize || shape.threads > 1024) {
    return format("a block of %d threads; it must be a multiple of 32 up to 1024", shape.threads);
  }
  if (shape.smem_bytes > max_shared_bytes(options.arch)) {
    return format("%u bytes of shared memory; sm_%d has %u", shape.smem_bytes, options.arch,
                  max_shared_bytes(options.arch));
  }
  const int64_t blocks = shape.cluster.count();
  if (blocks > 1 && options.arch < 90) return format("clusters need sm_90, this is sm_%d", options.arch);
  if (blocks < 1 || blocks > 8 || shape.grid.x % shape.cluster.x || shape.grid.y % shape.cluster.y ||
      shape.grid.z % shape.cluster.z) {
    return format("clusters of %u x %u x %u in a grid of %u x %u x %u", shape.cluster.x, shape.cluster.y,
                  shape.cluster.z, shape.grid.x, shape.grid.y, shape.grid.z);
  }
  if (blocks * shape.threads > kMaxWarps * kWarpSize) {
    return format("the emulator runs clusters of up to %d warps, this one has %lld", kMaxWarps,
                  (long long)(blocks * shape.threads / kWarpSize));
  }
  constexpr uint32_t kMaxGridYZ = 65535;
  if (shape.grid.count() == 0 || shape.grid.y > kMaxGridYZ || shape.grid.z > kMaxGridYZ) {
    return format("a grid of %u x %u x %u blocks", shape.grid.x, shape.grid.y, shape.grid.z);
  }
  return "";
}

struct Session {
  std::mutex mutex;
  Options options;
  Report report;
};

Session& session() {
  static Session instance;
  return instance;
}

}  // namespace

Report run_grid(const GridShape& shape, const std::function<void()>& kernel, const Options& options) {
  Report total;
  const std::string problem = problem_with(shape, options);
  if (!problem.empty()) {
    total.errors.push_back({"launch", problem, "", 0, 1});
    return total;
  }
  const GlobalRanges global = GlobalRanges::snapshot();
  FaultGuard fault_guard;
  std::atomic<int64_t> next_cluster{0};
  std::mutex total_mutex;
  const auto work = [&] {
    Report part;
    try {
      part = run_clusters(shape, kernel, options, global, next_cluster);
    } catch (const std::exception& problem) {
      part.errors.push_back({"launch", problem.what(), "", 0, 1});
    }
    std::lock_guard<std::mutex> lock(total_mutex);
    total.merge(part);
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < options.os_threads; ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  return total;
}

Options current_options() {
  std::lock_guard<std::mutex> lock(session().mutex);
  return session().options;
}

void set_current_options(const Options& options) {
  std::lock_guard<std::mutex> lock(session().mutex);
  session().options = options;
}

void add_to_session(const Report& report) {
  std::lock_guard<std::mutex> lock(session().mutex);
  session().report.merge(report);
}

Report take_session_report() {
  std::lock_guard<std::mutex> lock(session().mutex);
  Report report;
  std::swap(report, session().report);
  return report;
}

}  // namespace ffpa::emu
