#include "ptx/emulated/machine/run.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <set>
#include <thread>

#include "base/math.h"
#include "ptx/emulated/instructions.cuh"

namespace ffpa::emu {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kStackBytes = 192 << 10;         // bytes for each CUDA thread
constexpr size_t kPoisonedStackBytes = 16 << 10;  // more than any kernel's frames take
constexpr size_t kFaultStackBytes = 256 << 10;

int64_t count_of(const GridDim& extent) { return int64_t(extent.x) * extent.y * extent.z; }

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

// The clusters of a launch that one OS thread runs. One runs until it ends, or waits for others; then another goes on
// or begins. The first blocks of a launch that is not cooperative may be alone on a GPU, so no cluster begins here
// before the last one has ended, unless a random seed lets a few of them mix.
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
    idle_.push_back(std::make_unique<Machine>());
    idle_.back()->report.add({"deadlock", to_string(place), text, place});
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

// Returns the bytes of dynamic shared memory that one block may ask for.
uint32_t max_shared_bytes(int arch) {
  if (arch == 80 || arch == 87) return 163 << 10;
  const bool is_small = arch == 86 || arch == 89 || arch == 120;
  return is_small ? 99 << 10 : 227 << 10;
}

// Returns how many blocks a GPU of this kind holds at once, as far as threads and shared memory say: the emulator knows
// no registers.
int64_t resident_blocks(const LaunchShape& shape, int arch) {
  const int64_t multiprocessors = arch >= kSm90 ? 132 : 108;
  const uint32_t by_memory = max_shared_bytes(arch) / std::max(shape.smem_bytes, 1u);
  return multiprocessors * std::min({uint32_t(2048 / shape.threads), by_memory, 32u});
}

std::string problem_with(const LaunchShape& shape, const Options& options) {
  if (shape.threads <= 0 || shape.threads % kWarpSize || shape.threads > 1024) {
    return format("a block of %d threads; it must be a multiple of 32 up to 1024", shape.threads);
  }
  if (shape.smem_bytes > max_shared_bytes(options.arch)) {
    return format("%u bytes of shared memory; sm_%d has %u", shape.smem_bytes, options.arch,
                  max_shared_bytes(options.arch));
  }
  const int64_t blocks = count_of(shape.cluster);
  if (blocks > 1 && options.arch < kSm90) return format("clusters need sm_90, this is sm_%d", options.arch);
  if (blocks < 1 || blocks > 8 || shape.grid.x % shape.cluster.x || shape.grid.y % shape.cluster.y ||
      shape.grid.z % shape.cluster.z) {
    return format("clusters of %u x %u x %u in a grid of %u x %u x %u", shape.cluster.x, shape.cluster.y,
                  shape.cluster.z, shape.grid.x, shape.grid.y, shape.grid.z);
  }
  if (blocks * shape.threads > kMaxWarps * kWarpSize) {
    return format("the emulator runs clusters of up to %d warps, this one has %lld", kMaxWarps,
                  (long long)(blocks * shape.threads / kWarpSize));
  }
  const int64_t resident = resident_blocks(shape, options.arch);
  if (shape.cooperative && count_of(shape.grid) > resident) {
    return format("a cooperative grid of %lld blocks; sm_%d holds %lld of them at once",
                  (long long)count_of(shape.grid), options.arch, (long long)resident);
  }
  constexpr uint32_t kMaxGridYZ = 65535;
  if (count_of(shape.grid) == 0 || shape.grid.y > kMaxGridYZ || shape.grid.z > kMaxGridYZ) {
    return format("a grid of %u x %u x %u blocks", shape.grid.x, shape.grid.y, shape.grid.z);
  }
  return "";
}

// Runs `kernel` once for every CUDA thread of the grid, and returns what happened. It never throws, aborts or hangs,
// whatever the kernel does; after a failure the results in global memory are incomplete.
Report report_of(const LaunchShape& shape, const std::function<void()>& kernel, const Options& options) {
  Report total;
  const std::string problem = problem_with(shape, options);
  if (!problem.empty()) {
    total.add({"launch", problem, problem, {"", 0}});
    return total;
  }
  GlobalMemory global(std::max(options.os_threads, 1));
  std::atomic<int64_t> next_cluster{0};
  std::mutex total_mutex;
  const auto work = [&] {
    Report part;
    try {
      part = ClusterRunner(shape, kernel, options, global, next_cluster).run();
    } catch (const std::exception& problem) {
      part.add({"launch", problem.what(), problem.what(), {"", 0}});
      global.leave(true);
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

struct Session {
  std::mutex mutex;
  Options options;
  Report report;
  // Messages of failed launches are kept for whoever asks: failures are few. They are no thread-local, since the loader
  // reserves little space for those of each emulated module (machine.h).
  std::set<std::string> messages;
};

Session session;

}  // namespace

Machine::~Machine() {
  for (char* stack : stacks) munmap(stack - kPageBytes, kStackBytes + kPageBytes);
}

std::string to_string(CallSite site) {
  const char* slash = std::strrchr(site.file, '/');
  return format("%s:%d", slash ? slash + 1 : site.file, site.line);
}

std::string format(const char* pattern, ...) {
  va_list values;
  va_start(values, pattern);
  const std::string text = format(pattern, values);
  va_end(values);
  return text;
}

std::string format(const char* pattern, va_list values) {
  char* text = nullptr;
  if (vasprintf(&text, pattern, values) < 0) throw std::bad_alloc();
  const std::unique_ptr<char, decltype(&std::free)> owner(text, std::free);
  return text;
}

void BankConflicts::add(const BankConflicts& other) {
  executions += other.executions;
  wavefronts += other.wavefronts;
  ideal_wavefronts += other.ideal_wavefronts;
  worst_way = std::max(worst_way, other.worst_way);
}

void Counters::add(const Counters& other) {
  blocks += other.blocks;
  mma += other.mma;
  wgmma += other.wgmma;
  barriers += other.barriers;
  bytes_global_to_shared += other.bytes_global_to_shared;
  bytes_global_loaded += other.bytes_global_loaded;
  bytes_global_stored += other.bytes_global_stored;
}

void Report::add(const Error& error) {
  const auto same = std::find_if(errors.begin(), errors.end(),
                                 [&](const Error& mine) { return mine.kind == error.kind && mine.key == error.key; });
  if (same == errors.end()) {
    errors.push_back(error);
  } else {
    same->count += error.count;
  }
}

void Report::merge(const Report& other) {
  for (const Error& error : other.errors) add(error);
  for (const auto& [instruction, conflicts] : other.bank_conflicts) bank_conflicts[instruction].add(conflicts);
  counters.add(other.counters);
}

std::string Report::summary() const {
  std::string text;
  for (const Error& error : errors) {
    if (!text.empty()) text += "\n";
    text += error.kind + " (" + std::to_string(error.count) + "x): " + error.message;
  }
  return text;
}

LaunchStatus run_grid(const LaunchShape& shape, const std::function<void()>& kernel) {
  std::unique_lock<std::mutex> lock(session.mutex);
  const Options options = session.options;
  lock.unlock();
  const Report report = report_of(shape, kernel, options);
  lock.lock();
  session.report.merge(report);
  if (report.errors.empty()) return {};
  return {1, session.messages.insert("emulator: " + report.summary()).first->c_str()};
}

void set_current_options(const Options& options) {
  std::lock_guard<std::mutex> lock(session.mutex);
  session.options = options;
}

Report take_session_report() {
  std::lock_guard<std::mutex> lock(session.mutex);
  Report report;
  std::swap(report, session.report);
  return report;
}

}  // namespace ffpa::emu
