// This file runs the clusters of a launch, one after the other or, where they wait for each other, in turn.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <exception>
#include <new>

#include "base/math.h"
#include "ptx/emulated/instructions.cuh"

namespace ffpa::emu {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kStackBytes = 192 << 10;         // bytes for each CUDA thread
constexpr size_t kPoisonedStackBytes = 16 << 10;  // more than any kernel's frames take
constexpr size_t kFaultStackBytes = 256 << 10;

// Returns the coordinates of number `i` in a grid of this extent.
GridDim place_of(int64_t i, const GridDim& extent) {
  return {uint32_t(i % extent.x), uint32_t(i / extent.x % extent.y), uint32_t(i / extent.x / extent.y)};
}

// Turns a SIGSEGV in a kernel (a plain pointer gone wrong, a stack overflow) into an error of the report. Faults
// outside emulated lanes go to whoever handled them before.
class FaultGuard {
 public:
  // The handler is installed while there is a guard on any thread. Each one gives its OS thread a separate stack to
  // handle faults on: the stack that faults may be the problem.
  FaultGuard() : memory_(new char[kFaultStackBytes]) {
    stack_t stack = {};
    stack.ss_sp = memory_.get();
    stack.ss_size = kFaultStackBytes;
    sigaltstack(&stack, &previous_stack_);
    std::lock_guard<std::mutex> lock(mutex_);
    if (count_++) return;
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &previous_action_);
  }

  ~FaultGuard() {
    sigaltstack(&previous_stack_, nullptr);
    std::lock_guard<std::mutex> lock(mutex_);
    if (--count_ == 0) sigaction(SIGSEGV, &previous_action_, nullptr);
  }

 private:
  static void on_fault(int signal, siginfo_t* info, void*) {
    if (!current || !current->warp) {
      // The fault is not the emulator's. The instruction faults again and reaches the previous action, now back in
      // place.
      sigaction(signal, &previous_action_, nullptr);
      return;
    }
    // `fail` leaves this handler for good, so the signal has to be unblocked by hand.
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, signal);
    pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    fail("segfault", CallSite("kernel", 0),
         "access to %p: a plain pointer out of bounds, or a stack overflow; the last instruction that the warp "
         "gathered in is %s",
         info->si_addr, to_string(current->warp->op.site).c_str());
  }

  inline static std::mutex mutex_;
  inline static int count_ = 0;
  inline static struct sigaction previous_action_;
  std::unique_ptr<char[]> memory_;
  stack_t previous_stack_;
};

// Allocates a stack with an unreadable page below it.
char* new_stack() {
  void* memory = mmap(nullptr, kStackBytes + kPageBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, kPageBytes, PROT_NONE);
  return static_cast<char*>(memory) + kPageBytes;
}

void lane_entry() {
  finish_first_switch(machine->launcher.context);
  try {
    machine->kernel();
  } catch (const std::exception& problem) {
    fail("launch", CallSite("kernel", 0), "an exception left the kernel: %s", problem.what());
  }
  exit_lane();
}

void reset_block(Block& block, int rank, const GridDim& index) {
  const LaunchShape& shape = machine->shape;
  block.index = index;
  block.rank = rank;
  block.threads = shape.threads;
  block.smem_bytes = shape.smem_bytes;
  block.smem.assign(shape.smem_bytes, 0xff);
  block.mbarriers.clear();
  block.wgmma_history.assign(shape.threads / kWarpSize / 4, {});
  for (NamedBarrier& barrier : block.barriers) barrier = NamedBarrier{};
  if (machine->options.check_races) {
    const size_t words = ceil_div<size_t>(shape.smem_bytes, 4);
    const size_t warps_in_cluster = count_of(shape.cluster) * shape.threads / kWarpSize;
    block.shadow.assign(words, ShadowWord{});
    block.read_times.assign(words * warps_in_cluster, 0);
  }
}

void reset_lane(Warp& warp, int index) {
  const size_t id = size_t(warp.cluster_id) * kWarpSize + index;
  Lane& lane = machine->lanes[id];
  lane = Lane{};
  lane.block = warp.block;
  lane.warp = &warp;
  lane.index = index;
  lane.thread = warp.index * kWarpSize + index;
  warp.lanes[index] = &lane;
  // Stacks whose tops are all page-aligned would compete for the same sets of the L1 cache (15 to 29% slower).
  const size_t stagger = id % 61 * 1088;
  prepare(lane.context, machine->stacks[id], kStackBytes - stagger, kPoisonedStackBytes, lane_entry);
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
  for (int lane = 0; lane < kWarpSize; ++lane) reset_lane(warp, lane);
}

uint64_t hash_seed(uint64_t seed, const GridDim& block) {
  const uint64_t hash = seed * 0x9E3779B97F4A7C15ull + (block.x + 1) * 0xD1B54A32D192ED03ull +
                        (block.y + 1) * 0x94D049BB133111EBull + (block.z + 1) * 0xBF58476D1CE4E5B9ull;
  return hash ? hash : 1;
}

// Prepares the machine for this cluster.
void begin_cluster(Machine& self, const GridDim& first_block) {
  const LaunchShape& shape = self.shape;
  const int block_count = int(count_of(shape.cluster));
  static_cast<ClusterState&>(self) = {};
  self.random_state = hash_seed(self.options.seed, first_block);
  self.lanes_alive = int64_t(block_count) * shape.threads;
  self.lanes.resize(self.lanes_alive);
  while (self.stacks.size() < self.lanes.size()) self.stacks.push_back(new_stack());
  while (int(self.blocks.size()) < block_count) self.blocks.push_back(std::make_unique<Block>());

  for (int rank = 0; rank < block_count; ++rank) {
    Block& block = *self.blocks[rank];
    const GridDim within = place_of(rank, shape.cluster);
    reset_block(block, rank, {first_block.x + within.x, first_block.y + within.y, first_block.z + within.z});
    block.warps.resize(shape.threads / kWarpSize);
    for (size_t w = 0; w < block.warps.size(); ++w) reset_warp(block.warps[w], block, int(w));
  }
}

void end_cluster(Machine& self) {
  self.report.counters.blocks += self.blocks.size();
  if (!self.async_work.empty()) {
    report_error("exit", CallSite("kernel", 0), "the kernel ends with TMA loads, or arrivals of cp.async, in flight");
  }
  finish_bulk_stores();
  for (const auto& block : self.blocks) check_wgmma_at_exit(*block);
}

// A ClusterRunner has the clusters of a launch that one OS thread runs. One runs until it ends, or waits for others;
// then another goes on or begins. The first blocks of a launch that is not cooperative may be alone on a GPU, so no
// cluster begins here before the last one has ended, unless a random seed lets a few of them mix.
class ClusterRunner {
 public:
  ClusterRunner(const LaunchShape& shape, const std::function<void()>& kernel, const Options& options,
                GlobalMemory& global, std::atomic<int64_t>& next_cluster)
      : shape_(shape), kernel_(kernel), options_(options), global_(global), next_cluster_(next_cluster) {
    const GridDim size = shape.cluster;
    clusters_ = {shape.grid.x / size.x, shape.grid.y / size.y, shape.grid.z / size.z};
    most_ = shape.cooperative ? count_of(clusters_) : options.seed < 2 ? 1 : 1 + int64_t(options.seed % 3);
    random_ = hash_seed(options.seed, {});
  }

  Report run() {
    const FaultGuard fault_guard;
    while (!given_up_) {
      const uint64_t seen = global_.changes();
      const bool first = options_.seed >= 2 && next_random() % 2;  // a new one, although others could go on
      if ((first && begin()) || go_on() || begin()) continue;
      if (running_.empty()) break;
      if (global_.wait_for_change(seen)) continue;
      if (!global_.given_up()) report_deadlock();
      return report();
    }
    if (given_up_) next_cluster_ = count_of(clusters_);
    global_.leave(given_up_);
    return report();
  }

 private:
  // Blocks of a grid begin in any order.
  int64_t cluster_at(int64_t i) const {
    const int64_t count = count_of(clusters_);
    if (options_.seed == 0) return i;
    return options_.seed == 1 ? count - 1 - i : (i + int64_t(options_.seed)) % count;
  }

  bool begin() {
    if (int64_t(running_.size()) >= most_) return false;
    const int64_t i = next_cluster_++;
    if (i >= count_of(clusters_)) return false;
    if (idle_.empty()) {
      idle_.push_back(std::make_unique<Machine>());
      Machine& fresh = *idle_.back();
      fresh.options = options_;
      fresh.global = &global_;
      fresh.shape = shape_;
      fresh.kernel = kernel_;
    }
    running_.push_back(std::move(idle_.back()));
    idle_.pop_back();
    machine = running_.back().get();
    machine->cluster = uint32_t(cluster_at(i));
    const GridDim place = place_of(machine->cluster, clusters_), size = shape_.cluster;
    begin_cluster(*machine, {place.x * size.x, place.y * size.y, place.z * size.z});
    return run(running_.size() - 1);
  }

  // Lets one that can run go on.
  bool go_on() {
    const size_t count = running_.size(), first = options_.seed < 2 ? 0 : next_random() % std::max<size_t>(count, 1);
    for (size_t n = 0; n < count; ++n) {
      if (run(options_.seed == 1 ? count - 1 - n : (first + n) % count)) return true;
    }
    return false;
  }

  bool run(size_t i) {
    machine = running_[i].get();
    const bool ran = run_lanes();
    given_up_ = machine->given_up;
    if (!given_up_ && machine->lanes_alive == 0) {
      end_cluster(*machine);
      idle_.push_back(std::move(running_[i]));
      running_.erase(running_.begin() + i);
    }
    machine = nullptr;
    return ran;
  }

  void report_deadlock() {
    std::string text = "no block can go on.";
    CallSite place("", 0);
    for (const auto& waiting : running_) {
      machine = waiting.get();
      text += describe_waits(place);
    }
    machine = nullptr;
    const int64_t left =
        count_of(shape_.grid) - std::min<int64_t>(next_cluster_, count_of(clusters_)) * count_of(shape_.cluster);
    if (left > 0)
      text += format(" %lld blocks have not begun: no other is sure to run while these wait", (long long)left);
    running_.front()->report.add({"deadlock", to_string(place), text, place});
  }

  Report report() const {
    Report total;
    for (const auto* machines : {&running_, &idle_}) {
      for (const auto& each : *machines) total.merge(each->report);
    }
    return total;
  }

  uint64_t next_random() { return (random_ = hash_seed(random_, {})) >> 20; }

  const LaunchShape& shape_;
  const std::function<void()>& kernel_;
  const Options& options_;
  GlobalMemory& global_;
  std::atomic<int64_t>& next_cluster_;
  GridDim clusters_;
  int64_t most_;
  uint64_t random_;
  bool given_up_ = false;
  std::vector<std::unique_ptr<Machine>> running_, idle_;
};

}  // namespace

Machine::~Machine() {
  for (char* stack : stacks) munmap(stack - kPageBytes, kStackBytes + kPageBytes);
}

Report run_clusters(const LaunchShape& shape, const std::function<void()>& kernel, const Options& options,
                    GlobalMemory& global, std::atomic<int64_t>& next_cluster) {
  return ClusterRunner(shape, kernel, options, global, next_cluster).run();
}

}  // namespace ffpa::emu
