// The state of one emulated cluster of blocks, run by one OS thread: lanes, warps, blocks, and their scheduler.
//
// Every CUDA thread ("lane") is a flow of control with its own stack. It runs until it blocks: in a collective of its
// warp, at a barrier, on an mbarrier, on a flag in global memory. The last lane to reach a collective executes it for
// all 32. What the asynchronous units of a GPU do (cp.async, TMA, wgmma) is deferred to the latest moment the kernel's
// waits allow.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ptx/emulated/machine/global_accesses.h"
#include "ptx/emulated/machine/matrix.h"
#include "ptx/emulated/machine/run.h"
#include "ptx/emulated/machine/tma.h"
#include "ptx/emulated/machine/vector_clock.h"
#include "ptx/launch_types.h"

#if defined(__x86_64__) && !defined(FFPA_EMU_UCONTEXT)
#define FFPA_EMU_FAST_SWITCH 1
#else
#define FFPA_EMU_FAST_SWITCH 0
#include <ucontext.h>
#endif

namespace ffpa::emu {

struct Block;
struct Lane;
struct Warp;

inline constexpr uint32_t kAllLanes = ~0u;

inline int64_t count_of(const GridDim& extent) { return int64_t(extent.x) * extent.y * extent.z; }

inline constexpr int kNobody = 255;

// One cp.async that has been issued and not waited for.
struct PendingCopy {
  uint32_t destination;
  const uint8_t* source;  // null: it writes zeros
  uint32_t group;
  uint32_t time;  // time as copies_of(warp) counts it
  CallSite site;
  bool landed = false;    // true when the bytes are there
  bool complete = false;  // true when, besides, a wait or an mbarrier may rely on them
};

// A cp.async.mbarrier.arrive: it counts once the copies that the lane has issued up to `time` have landed.
struct CopyArrival {
  Lane* lane;
  uint32_t time;
};

struct Mbarrier {
  Block* block = nullptr;
  uint32_t offset = 0;  // shared address without the block's rank
  uint32_t expected_arrivals = 0;
  uint32_t pending_arrivals = 0;
  std::vector<CopyArrival> copy_arrivals;  // arrivals in the phase in progress, part of pending_arrivals
  int64_t pending_bytes = 0;
  uint32_t phase = 0;  // parity of the phase in progress
  int64_t completed_phases = 0;
  VectorClock arriving;   // knowledge that the arrivals of the phase in progress bring
  VectorClock completed;  // knowledge that a waiter gains
  int initialising_warp = 0;
  uint32_t initialised_at = 0;
};

// A suspended flow of control. A default-constructed one receives the caller's flow in switch_to.
struct Context {
#if FFPA_EMU_FAST_SWITCH
  void* stack_pointer = nullptr;
#else
  ucontext_t registers;
#endif
  const void* stack_low = nullptr;  // AddressSanitizer has to know the stacks; unused otherwise
  size_t stack_bytes = 0;
  void* sanitizer_state = nullptr;
};

struct Lane {
  Context context;
  Block* block = nullptr;
  Warp* warp = nullptr;
  int index = 0;   // number within the warp
  int thread = 0;  // number within the block

  std::vector<PendingCopy> copies;
  uint32_t open_copy_group = 0;
  uint32_t copy_time = 1;  // time of the next copy

  std::vector<uint32_t> pending_stores;  // stores that are not complete: positions in Machine::bulk_stores
  uint32_t open_store_group = 0;

  // These say what the lane waits for, for the deadlock report and for wake-ups.
  Instruction waiting{"?", {"", 0}};
  const Mbarrier* waiting_mbarrier = nullptr;
  uint32_t waiting_parity = 0;
  const uint32_t* waiting_flag = nullptr;  // in global memory, for this value or a larger one
  uint32_t waiting_value = 0;
};

// The accesses to shared memory that one source line of a warp made, until the warp's next collective: the k-th
// executions by all lanes together are one instruction.
struct SharedInstruction {
  Instruction instruction;
  int bytes_per_lane;
  uint32_t active_lanes = 0;
  uint32_t address[kWarpSize] = {};
};
struct SharedAccessLog {
  CallSite site;
  uint16_t executions[kWarpSize];
  std::vector<SharedInstruction> instructions;
};

struct Warp {
  int index = 0;       // number within the block
  int cluster_id = 0;  // number within the cluster: index of the vector clock
  Block* block = nullptr;
  Lane* lanes[kWarpSize] = {};
  uint32_t ready = 0;  // lanes that can run
  uint32_t alive = 0;  // lanes that have not exited

  // The collective that the warp is gathering in.
  uint32_t arrived = 0;
  Instruction op{"", {"", 0}};
  void* arguments[kWarpSize] = {};
  uint32_t exchanged[kWarpSize] = {};  // the values of all lanes in the last shuffle or vote

  VectorClock clock;
  uint32_t sync_epoch = 1;   // advances at __syncwarp and every barrier: orders the lanes among themselves
  uint32_t proxy_epoch = 1;  // advances at fence.proxy.async

  FarClock at_fence;  // what relaxed atomic operations tell: all that was known at the last fence.acq_rel
  FarClock seen;      // what they have been told, which the next fence makes known

  std::vector<SharedAccessLog> access_logs;
  WgmmaQueue wgmma;

  // Rounds of the cluster barrier that this warp has arrived for, and those that it has waited for.
  int64_t cluster_arrivals = 0;
  int64_t cluster_waits = 0;

  // The warp lets others learn what it has done so far, and its lanes learn it of each other.
  void advance() {
    ++clock.at[cluster_id];
    ++sync_epoch;
  }
};

struct NamedBarrier {
  int arrived_threads = 0;
  int expected_threads = 0;
  uint64_t waiting_warps = 0;
  VectorClock clock;
};

// The shadow of 4 bytes of shared memory: who wrote and read them last.
struct ShadowWord {
  uint32_t write_time = 0;
  uint32_t write_sync_epoch = 0;
  uint32_t write_proxy_epoch = 0;
  uint32_t read_sync_epoch = 0;
  uint32_t copy_time = 0;    // time of the last write if it was a completed cp.async: copies_of the writer
  uint32_t copied_time = 0;  // kAsyncAgent's time when the last copy of the word to another block landed
  uint8_t writer = kNobody;  // cluster id of a warp, or kAsyncAgent
  uint8_t writer_lane = 0;
  uint8_t reader = kNobody;  // last reader; Block::read_times has the times of all readers
  uint8_t reader_lane = 0;
  uint16_t bulk_reads = 0;     // number of TMA stores and copies to another block that may still read it
  bool in_flight = false;      // true in the destination of an asynchronous copy that has not been waited for
  bool generic_write = false;  // written by st.shared or stmatrix: invisible to wgmma and TMA without a proxy fence
  CallSite write_site{"", 0};
  CallSite read_site{"", 0};
};

struct Block {
  GridDim index;
  int rank = 0;  // number within the cluster
  int threads = 0;
  uint32_t smem_bytes = 0;
  std::vector<uint8_t> smem;
  std::vector<ShadowWord> shadow;
  std::vector<uint32_t> read_times;  // [word][warp of the cluster]
  std::vector<Warp> warps;
  NamedBarrier barriers[16];
  std::map<uint32_t, Mbarrier> mbarriers;               // keyed by their offsets
  std::vector<std::vector<WgmmaRecord>> wgmma_history;  // indexed by warpgroup
};

// Each cluster begins with a new one of these.
struct ClusterState {
  std::vector<Warp*> warps;  // indexed by cluster id
  int64_t lanes_alive = 0;
  uint64_t ready_warps = 0;
  Warp* running_warp = nullptr;
  int flag_waits = 0;  // lanes that wait for a flag in global memory
  bool given_up = false;
  uint64_t random_state = 1;
  int64_t steps = 0;

  // TMA loads and copies to another block in flight, and mbarrier phases that wait for cp.async alone.
  std::vector<std::function<void()>> async_work;
  uint32_t async_time = 0;             // kAsyncAgent's time
  std::vector<BulkStore> bulk_stores;  // all stores of the cluster, in the order of issue
  GlobalMarks bulk_footprint;          // 1 + the bulk store that last wrote there
  int cluster_arrived_warps = 0;       // arrivals in the round in progress
  int64_t cluster_rounds = 0;          // completed rounds
  VectorClock cluster_arriving, cluster_completed;
};

struct Machine : ClusterState {
  Options options;
  GlobalMemory* global = nullptr;
  LaunchShape shape;
  std::function<void()> kernel;

  uint32_t cluster = 0;                        // number of the cluster that runs now
  std::vector<std::unique_ptr<Block>> blocks;  // blocks of that cluster
  std::vector<Lane> lanes;
  std::vector<char*> stacks;
  Lane launcher;  // stands for the code that started the run
  Report report;

  ~Machine();
  uint32_t random();
  bool random_schedule() const { return options.seed >= 2; }
  bool by_chance(uint32_t odds) { return random_schedule() && random() % odds == 0; }  // never with seeds 0 and 1
};

// The machine and lane that run on this OS thread. Lanes never move between OS threads. The initial-exec model makes a
// read as cheap as that of a global; the two pointers fit in the space that the loader reserves for it.
inline thread_local Machine* machine __attribute__((tls_model("initial-exec"))) = nullptr;
inline thread_local Lane* current __attribute__((tls_model("initial-exec"))) = nullptr;

// Records an error and goes on. Errors of one kind, place and pattern are counted, not repeated.
void report_error(const char* kind, CallSite site, const char* pattern, ...) __attribute__((format(printf, 3, 4)));

// Records an error of the current lane and gives up the run: the error leaves no sensible way to go on.
[[noreturn]] void fail(const char* kind, CallSite site, const char* pattern, ...) __attribute__((format(printf, 3, 4)));

// Fails with "unsupported" unless the emulated GPU is of sm_90 or later.
void require_sm90(const Instruction& instruction);

// Counts one emulated instruction, so that endless loops end.
inline void count_step(CallSite site) {
  if (++machine->steps > machine->options.max_steps) {
    fail("hang", site, "more than %lld emulated instructions", (long long)machine->options.max_steps);
  }
}

// Fails unless the current lane may access these bytes of global memory; returns the access's mark.
uint32_t check_global(const void* address, uint32_t bytes, uint32_t alignment, Access access,
                      const Instruction& instruction, Proxy proxy = Proxy::kGeneric);

// mbarriers call this to complete the lane's copies up to this time (PendingCopy::time). Its own waits may still come.
void land_tracked_copies(Lane& lane, uint32_t time);

bool flag_has_come(const Lane& lane);

// Returns what the current warp knows now, for others to learn: what it does later is not part of it.
FarClock publish();

Mbarrier& find_mbarrier(uint32_t address, const Instruction& instruction);
uint32_t remote_address(uint32_t address, uint32_t rank, CallSite site);  // stands for mapa
bool has_exited(const Block& block);

// Completes bytes of a copy that landed at this time of the TMA unit, and that its issuer began with this knowledge.
void complete_bytes(Block& block, uint32_t barrier, uint32_t bytes, const VectorClock& issuer, uint32_t landed_at);

// Warp collectives: all 32 lanes come to the same instruction of the same source line, and the last one executes it.

// Registers the current lane's arrival; fails with "divergence" when other lanes wait in another collective. Returns
// whether it was the last lane, which then has to execute the instruction, and to leave or to block.
bool arrive_at_collective(const Instruction& op, void* arguments);
void leave_collective();

// `execute(warp)` runs once for the warp and finds every lane's `arguments` in warp.arguments.
template <class Execute>
void collective(const Instruction& op, void* arguments, Execute execute) {
  if (!arrive_at_collective(op, arguments)) return;
  execute(*current->warp);
  leave_collective();
}

template <class Execute>
void sm90_collective(const Instruction& op, void* arguments, Execute execute) {
  require_sm90(op);
  collective(op, arguments, execute);
}

template <class Arguments>
Arguments& arguments_of(Warp& warp, int lane) {
  return *static_cast<Arguments*>(warp.arguments[lane]);
}

// These three switch between the stacks of CUDA threads.

// Makes `context` start in `entry` on the given stack when it is first switched to. `entry` must never return. The
// first `poisoned_bytes` of stack that it will use are NaN, so that variables nobody has set show.
void prepare(Context& context, char* stack_low, size_t stack_bytes, size_t poisoned_bytes, void (*entry)());

// Saves the running flow in `from` and resumes `to`. `from_is_finished` says that nobody will resume `from` again.
void switch_to(Context& from, Context& to, bool from_is_finished = false);

// This must be the first statement of every `entry`.
void finish_first_switch(Context& launcher);

// The functions from here on are the scheduler's, which decides which lane runs next.

// Suspends the current lane until somebody wakes it.
void block_lane(const Instruction& waiting);

// Makes lanes of a warp runnable again.
void wake(Warp& warp, uint32_t lanes);

// Marks a point where, with random seeds, another warp may overtake.
void maybe_preempt();

// Ends the current lane and never returns.
[[noreturn]] void exit_lane();

// With random seeds, lets other clusters run before the current lane goes on.
void maybe_yield_to_clusters();

// Runs the lanes of machine->blocks to their end, until a failure, or until they wait for other clusters or yield to
// them. Returns whether any could run.
bool run_lanes();

// Runs on one OS thread: takes clusters until there are none left or somebody gives up.
Report run_clusters(const LaunchShape& shape, const std::function<void()>& kernel, const Options& options,
                    GlobalMemory& global, std::atomic<int64_t>& next_cluster);

// Says where the machine's lanes wait; the first place goes to `first` if that has no line.
std::string describe_waits(CallSite& first);

}  // namespace ffpa::emu
