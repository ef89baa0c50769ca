#include <cstdlib>

#include "ptx/emulated/instructions.cuh"

namespace ffpa::emu {
namespace {

void resume(Lane& next, bool current_is_finished = false) {
  Lane& previous = *current;
  current = &next;
  switch_to(previous.context, next.context, current_is_finished);
}

// Leaves the current lane for good.
[[noreturn]] void abandon_lane_for(Lane& next) {
  resume(next, true);
  std::abort();  // unreachable: nobody resumes such a lane
}

void mark_not_ready(Lane& lane) {
  lane.warp->ready &= ~(1u << lane.index);
  if (!lane.warp->ready) machine->ready_warps &= ~(uint64_t(1) << lane.warp->cluster_id);
}

Warp* pick_warp() {
  uint64_t candidates = machine->ready_warps;
  if (!candidates) return nullptr;
  if (machine->options.seed == 0) return machine->warps[__builtin_ctzll(candidates)];
  if (machine->options.seed == 1) return machine->warps[63 - __builtin_clzll(candidates)];
  int skip = int(machine->random() % __builtin_popcountll(candidates));
  while (skip--) candidates &= candidates - 1;
  return machine->warps[__builtin_ctzll(candidates)];
}

bool run_async_work() {
  auto& work = machine->async_work;
  if (work.empty()) return false;
  const size_t choice = machine->random_schedule() ? machine->random() % work.size() : 0;
  const std::function<void()> action = std::move(work[choice]);
  work.erase(work.begin() + choice);
  action();
  return true;
}

Lane* pick_lane(Warp& warp) {
  const uint32_t first = machine->random_schedule() ? machine->random() % kWarpSize : 0;
  const uint32_t rotated = first ? warp.ready >> first | warp.ready << (kWarpSize - first) : warp.ready;
  return warp.lanes[(__builtin_ctz(rotated) + first) % kWarpSize];
}

// Wakes those whose flags in global memory have come.
bool wake_flag_waiters() {
  bool woken = false;
  for (size_t i = 0; machine->flag_waits && i < machine->lanes.size(); ++i) {
    const Lane& lane = machine->lanes[i];
    if (!lane.waiting_flag || !flag_has_come(lane)) continue;
    wake(*lane.warp, 1u << lane.index);
    woken = true;
  }
  return woken;
}

// Picks the next lane to run; nullptr when nobody can run, now or ever.
Lane* pick() {
  if (machine->by_chance(16)) {  // random seeds land TMA loads and see flags at any time, others as late as can be
    run_async_work();
    wake_flag_waiters();
  }
  for (;;) {
    Warp* warp = machine->running_warp;
    if (!warp || !warp->ready) warp = pick_warp();
    if (warp) {
      machine->running_warp = warp;
      return pick_lane(*warp);
    }
    if (!run_async_work() && !wake_flag_waiters()) return nullptr;
  }
}

// Returns whoever runs next: where all wait, and some of them for other clusters, the code that runs clusters.
Lane& next_to_run() {
  if (Lane* next = pick()) return *next;
  if (machine->flag_waits) return machine->launcher;
  CallSite place = current->waiting.site;
  const std::string waits = describe_waits(place);
  fail("deadlock", place, "no thread can run.%s", waits.c_str());
}

}  // namespace

uint32_t Machine::random() {  // xorshift64
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return uint32_t(random_state >> 11);
}

void report_error(const char* kind, CallSite site, const char* pattern, ...) {
  va_list values;
  va_start(values, pattern);
  machine->report.add({kind, pattern + to_string(site), format(pattern, values), site});
  va_end(values);
}

void fail(const char* kind, CallSite site, const char* pattern, ...) {
  va_list values;
  va_start(values, pattern);
  std::string text = format(pattern, values);
  va_end(values);
  if (current && current->warp) {
    const GridDim& block = current->block->index;
    text = format("block (%u, %u, %u) thread %d (warp %d, lane %d) at %s: ", block.x, block.y, block.z, current->thread,
                  current->warp->index, current->index, to_string(site).c_str()) +
           text;
  }
  machine->report.add({kind, to_string(site), text, site});
  machine->given_up = true;
  abandon_lane_for(machine->launcher);
}

void require_sm90(const Instruction& instruction) {
  const int arch = machine->options.arch;
  if (arch >= kSm90) return;
  fail("unsupported", instruction.site, "%s needs sm_%d, this is sm_%d", instruction.name, kSm90, arch);
}

void wake(Warp& warp, uint32_t lanes) {
  warp.ready |= lanes & warp.alive;
  if (warp.ready) machine->ready_warps |= uint64_t(1) << warp.cluster_id;
}

void block_lane(const Instruction& waiting) {
  current->waiting = waiting;
  mark_not_ready(*current);
  Lane& next = next_to_run();
  if (&next != current) resume(next);
}

void maybe_preempt() {
  if (!machine->by_chance(2)) return;
  machine->running_warp = pick_warp();
  Lane* next = pick();
  if (next && next != current) resume(*next);
}

void exit_lane() {
  Warp& warp = *current->warp;
  const auto in_flight = [](const PendingCopy& copy) { return !copy.complete; };
  const auto first = std::find_if(current->copies.begin(), current->copies.end(), in_flight);
  if (first != current->copies.end()) {
    report_error("exit", first->site, "a thread exits with %zd cp.async not waited for, the first issued at %s",
                 std::count_if(first, current->copies.end(), in_flight), to_string(first->site).c_str());
  }
  check_bulk_stores_at_exit(*current);
  mark_not_ready(*current);
  warp.alive &= ~(1u << current->index);
  if (!warp.alive) flush_access_logs(warp);
  if (--machine->lanes_alive == 0) abandon_lane_for(machine->launcher);
  abandon_lane_for(next_to_run());
}

void maybe_yield_to_clusters() {
  if (machine->by_chance(4)) resume(machine->launcher);
}

bool run_lanes() {
  current = &machine->launcher;
  Lane* first = pick();
  if (first) resume(*first);
  current = nullptr;
  return first != nullptr;
}

std::string describe_waits(CallSite& first) {
  std::string text;
  for (Warp* warp : machine->warps) {
    if (!warp->alive) continue;
    const GridDim& block = warp->block->index;
    text += format(" Block (%u, %u, %u) warp %d:", block.x, block.y, block.z, warp->index);
    if (warp->alive != kAllLanes) text += format(" lanes %08x exited;", ~warp->alive);
    std::map<std::string, uint32_t> lanes_by_place;
    for (Lane* lane : warp->lanes) {
      if (!(warp->alive >> lane->index & 1)) continue;
      std::string place = lane->waiting.name + (" at " + to_string(lane->waiting.site));
      if (lane->waiting_mbarrier) {
        place += format(" (mbarrier 0x%x, parity %u)", lane->waiting_mbarrier->offset, lane->waiting_parity);
      }
      if (lane->waiting_flag) {
        place += format(" (%p is %u and never %u, %s)", (const void*)lane->waiting_flag, *lane->waiting_flag,
                        lane->waiting_value, machine->global->describe_last_change(lane->waiting_flag).c_str());
      }
      lanes_by_place[place] |= 1u << lane->index;
      if (first.line == 0) first = lane->waiting.site;  // happens when the current lane has just exited
    }
    for (const auto& [place, lanes] : lanes_by_place) text += format(" lanes %08x in %s;", lanes, place.c_str());
  }
  return text;
}

}  // namespace ffpa::emu
