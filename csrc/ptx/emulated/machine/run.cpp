#include "ptx/emulated/machine/run.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <set>
#include <thread>

#include "ptx/emulated/instructions.cuh"

namespace ffpa::emu {
namespace {

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
      part = run_clusters(shape, kernel, options, global, next_cluster);
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
