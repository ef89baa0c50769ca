// This file has the flags and counters in global memory by which blocks tell each other what they have done, and wait.
#include "ptx/emulated/instructions.cuh"

namespace ffpa::emu {
namespace {

// The warp learns what a flag tells, of others and of its own cluster.
void learn(const FarClock& told) {
  VectorClock& clock = current->warp->clock;
  clock.far.join(told);
  if (!told.known) return;
  const auto own = told.known->find(machine->cluster);
  if (own == told.known->end()) return;
  for (int i = 0; i < kClocks; ++i) clock.at[i] = std::max(clock.at[i], own->second[i]);
}

uint32_t* check_flag(const void* address, Access access, const Instruction& instruction) {
  count_step(instruction.site);
  maybe_yield_to_clusters();
  check_global(address, 4, 4, access, instruction);
  machine->report.counters.bytes_global_loaded += access == Access::kAcquire ? 4 : 0;
  machine->report.counters.bytes_global_stored += access == Access::kAcquire ? 0 : 4;
  return static_cast<uint32_t*>(const_cast<void*>(address));
}

uint32_t value_of(const uint32_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }

// Makes result(what is there) of the counter, and does change(its clock) at this moment.
template <class Result, class Change>
uint32_t replace(void* address, const Instruction& instruction, Result result, Change change) {
  uint32_t* const counter = check_flag(address, Access::kAtomic, instruction);
  uint32_t before;
  machine->global->at_flag(address, true, [&](FarClock& clock) {
    before = value_of(counter);
    while (!__atomic_compare_exchange_n(counter, &before, result(before), false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    }
    change(clock);
  });
  return before;
}

template <class Change>
uint32_t add(void* address, uint32_t value, const Instruction& instruction, Change change) {
  return replace(address, instruction, [&](uint32_t before) { return before + value; }, change);
}

// Makes result(what is there) of a word, relaxed: what the warp knew at a fence before is handed on.
template <class Result>
uint32_t replace_relaxed(void* address, const Instruction& instruction, Result result) {
  return replace(address, instruction, result, [](FarClock& clock) {
    Warp& warp = *current->warp;
    warp.seen.join(clock);
    clock.join(warp.at_fence);
  });
}

}  // namespace

bool flag_has_come(const Lane& lane) { return value_of(lane.waiting_flag) >= lane.waiting_value; }

FarClock publish() {
  Warp& warp = *current->warp;
  auto own = std::make_shared<TimesOfClusters>();
  std::copy_n(warp.clock.at, kClocks, (*own)[machine->cluster].begin());
  ++warp.clock.at[warp.cluster_id];
  FarClock all = warp.clock.far;
  FarClock::join(all.known, own);
  return all;
}

}  // namespace ffpa::emu

namespace ffpa::ptx {
using namespace emu;

uint32_t ld_acquire_global_4(const void* address, CallSite site) {
  const uint32_t* const flag = check_flag(address, Access::kAcquire, {"ld.acquire.global", site});
  uint32_t value;
  machine->global->at_flag(address, false, [&](FarClock& clock) {
    value = value_of(flag);
    learn(clock);
  });
  return value;
}

void wait_global_at_least(const void* address, uint32_t value, CallSite site) {
  const Instruction instruction{"wait_global_at_least", site};
  const uint32_t* const flag = check_flag(address, Access::kAcquire, instruction);
  Lane& lane = *current;
  lane.waiting_value = value;
  while (value_of(flag) < value) {
    lane.waiting_flag = flag;
    ++machine->flag_waits;
    block_lane(instruction);
    --machine->flag_waits;
    lane.waiting_flag = nullptr;
  }
  machine->global->at_flag(address, false, learn);
}

// A store begins what the flag tells anew; an addition adds to it.
void st_release_global_4(void* address, uint32_t value, CallSite site) {
  uint32_t* const flag = check_flag(address, Access::kAtomic, {"st.release.global", site});
  machine->global->at_flag(address, true, [&](FarClock& clock) {
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
    clock = publish();
  });
}

void red_add_release_global(void* address, uint32_t value, CallSite site) {
  add(address, value, {"red.release.global", site}, [](FarClock& clock) { clock.join(publish()); });
}

uint32_t atom_add_acq_rel_global(void* address, uint32_t value, CallSite site) {
  return add(address, value, {"atom.acq_rel.global", site}, [](FarClock& clock) {
    learn(clock);
    clock.join(publish());
  });
}

uint32_t atom_add_global(void* address, uint32_t value, CallSite site) {
  return replace_relaxed(address, {"atom.global", site}, [&](uint32_t before) { return before + value; });
}

void red_max_signed_global(void* address, uint32_t value, CallSite site) {
  replace_relaxed(address, {"red.max.global", site},
                  [&](uint32_t before) { return uint32_t(std::max(int32_t(before), int32_t(value))); });
}

void red_min_global(void* address, uint32_t value, CallSite site) {
  replace_relaxed(address, {"red.min.global", site}, [&](uint32_t before) { return std::min(before, value); });
}

void fence_acq_rel_gpu(CallSite site) {
  count_step(site);
  Warp& warp = *current->warp;
  learn(warp.seen);
  warp.at_fence = publish();
}

}  // namespace ffpa::ptx
