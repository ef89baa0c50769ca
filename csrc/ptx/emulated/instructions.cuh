// The functions of ptx/native for the emulator, which a host compiler reads. Where a function has more than a line to
// do, machine/ defines it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/types.h"
#include "ptx/call_site.h"
#include "ptx/descriptors.h"
#include "ptx/emulated/machine/machine.h"
#include "ptx/emulated/machine/shared_memory.h"
#include "ptx/launch_types.h"

// What the templates below need of the machine.
namespace ffpa::emu {

// Returns the values of all lanes, which are there until the lane's next collective.
const uint32_t* exchange(uint32_t value, const Instruction& op);

void wait_for_copies(int pending_groups);

template <class Element>
inline constexpr InputType kInputType = std::is_same_v<Element, Half>       ? InputType::kHalf
                                        : std::is_same_v<Element, BFloat16> ? InputType::kBFloat16
                                        : std::is_same_v<Element, E4M3>     ? InputType::kE4M3
                                                                            : InputType::kE5M2;

// `d` points to 4 floats of the current lane, also where the accumulators are halves.
void mma_m16n8k16(InputType input, AccumulatorType accumulator, float* d, const uint32_t* a, uint32_t b0, uint32_t b1,
                  CallSite site);
void wgmma(const WgmmaOperands& operands, CallSite site);
void wgmma_wait(int pending_groups, CallSite site);
void set_max_registers(int registers, CallSite site);

inline constexpr uint16_t kOwnBlock = 0;  // block mask that means the own block only

// Coordinates are innermost first.
void tma_load(uint32_t destination, const TensorMapSpec& spec, uint32_t barrier, const std::vector<int>& coordinates,
              uint16_t block_mask, CallSite site);
void tma_store(const TensorMapSpec& spec, uint32_t source, const std::vector<int>& coordinates, CallSite site);

// Brings all but `pending_groups` of the lane's groups to this step.
void bulk_wait(int pending_groups, BulkStep step, CallSite site);

// Runs the grid under the current options and adds to the session's report. A report with errors is a failed launch.
LaunchStatus run_grid(const LaunchShape& shape, const std::function<void()>& kernel);

}  // namespace ffpa::emu

namespace ffpa::ptx {

// ---- threads.cuh ----

inline int thread_x() { return emu::current->thread; }
inline int thread_x_anew() { return thread_x(); }
inline int block_x() { return int(emu::current->block->index.x); }
inline int block_y() { return int(emu::current->block->index.y); }
inline int block_z() { return int(emu::current->block->index.z); }
inline int grid_x() { return int(emu::machine->shape.grid.x); }
inline int grid_y() { return int(emu::machine->shape.grid.y); }
inline int grid_z() { return int(emu::machine->shape.grid.z); }
inline int lane_id() { return emu::current->index; }
inline uint32_t dynamic_smem() { return emu::kSmemBase; }
inline uint32_t cluster_rank() { return uint32_t(emu::current->block->rank); }

template <class Value>
inline Value shfl_idx(Value value, int source_lane, CallSite site = CallSite()) {
  static_assert(sizeof(Value) == 4, "shuffles move 32-bit registers");
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = emu::exchange(bits, {"shfl.sync", site})[source_lane & (emu::kWarpSize - 1)];
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

template <class Value>
inline Value shfl_xor(Value value, int lane_mask, CallSite site = CallSite()) {
  return shfl_idx(value, lane_id() ^ lane_mask, site);
}

uint32_t vote_ballot(bool predicate, CallSite site = CallSite());
inline bool vote_any(bool predicate, CallSite site = CallSite()) { return vote_ballot(predicate, site) != 0; }
inline bool vote_all(bool predicate, CallSite site = CallSite()) { return vote_ballot(predicate, site) == ~0u; }
inline int bfind(uint32_t bits) { return bits == 0 ? -1 : 31 - __builtin_clz(bits); }
void sync_warp(CallSite site = CallSite());
bool elect_one(CallSite site = CallSite());

void bar_sync(int barrier, int threads, CallSite site = CallSite());
void bar_arrive(int barrier, int threads, CallSite site = CallSite());
inline void sync_block(CallSite site = CallSite()) { bar_sync(0, emu::current->block->threads, site); }

void cluster_arrive(CallSite site = CallSite());
void cluster_wait(CallSite site = CallSite());

void mbarrier_init(uint32_t barrier_smem, uint32_t arrivals, CallSite site = CallSite());

// The race check asks for a barrier between initialisation and use; it has no way to see this fence.
inline void fence_mbarrier_init() {}

void mbarrier_arrive(uint32_t barrier_smem, CallSite site = CallSite());
void mbarrier_arrive_remote(uint32_t barrier_smem, uint32_t rank, CallSite site = CallSite());
void mbarrier_arrive_expect_tx(uint32_t barrier_smem, uint32_t bytes, CallSite site = CallSite());
void mbarrier_wait(uint32_t barrier_smem, uint32_t parity, CallSite site = CallSite());

// Kernels run one after the other.
inline void let_next_kernel_start() {}
inline void wait_for_earlier_kernels() {}

// ---- arithmetic.cuh ----

template <class Element>
inline uint32_t pack(float low, float high) {
  return pack_bits(from_float<Element>(low).bits, from_float<Element>(high).bits);
}

template <class Element>
inline void unpack(uint32_t packed, float& low, float& high) {
  low = to_float(Element{low_bits(packed)});
  high = to_float(Element{high_bits(packed)});
}

template <class Element>
inline uint32_t multiply(uint32_t a, uint32_t b) {
  // Rounds towards zero and sets the last bit if that is inexact: as good as the exact product for rounding it further.
  const auto product = [](float x, float y) {
    const double exact = double(x) * y;
    const float nearest = float(exact);
    if (double(nearest) == exact || exact != exact) return nearest;
    const uint32_t bits = float_bits(nearest) - (std::fabs(double(nearest)) > std::fabs(exact));
    return float_from_bits(bits | 1);
  };
  float a_low, a_high, b_low, b_high;
  unpack<Element>(a, a_low, a_high);
  unpack<Element>(b, b_low, b_high);
  return pack<Element>(product(a_low, b_low), product(a_high, b_high));
}

template <class Element>
inline uint32_t pack4(float first, float second, float third, float fourth) {
  const auto bits = [](float value) { return uint32_t(from_float<Element>(value).bits); };
  return bits(first) | bits(second) << 8 | bits(third) << 16 | bits(fourth) << 24;
}

inline void halves_of_e4m3(uint32_t (&halves)[2], uint32_t four) {
  for (int i = 0; i < 2; ++i, four >>= 16) {
    halves[i] = pack<Half>(to_float(E4M3{uint8_t(four)}), to_float(E4M3{uint8_t(four >> 8)}));
  }
}

template <uint32_t kOrder>
inline uint32_t permute_bytes(uint32_t value) {
  uint32_t permuted = 0;
  for (int i = 0; i < 4; ++i) permuted |= (value >> (kOrder >> 4 * i & 3) * 8 & 0xff) << 8 * i;
  return permuted;
}

// `.ftz`: subnormal inputs and results count as zero, with their sign.
inline float flush_subnormal(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

inline float ex2(float x) { return flush_subnormal(std::exp2(flush_subnormal(x))); }
inline float lg2(float x) { return flush_subnormal(std::log2(flush_subnormal(x))); }
inline float rcp(float x) { return flush_subnormal(1.0f / flush_subnormal(x)); }
// A fma computes it, because no compiler contracts that further.
inline float mul_rn(float x, float y) { return std::fma(x, y, -0.0f); }
inline uint32_t moved_bits(float x) { return float_bits(x); }

// ---- memory.cuh ----

uint32_t ld_shared_4(uint32_t address, CallSite site = CallSite());
void ld_shared_8(uint32_t (&value)[2], uint32_t address, CallSite site = CallSite());
void ld_shared_16(uint32_t (&value)[4], uint32_t address, CallSite site = CallSite());

void st_shared_4(uint32_t address, uint32_t value, CallSite site = CallSite());
void st_shared_8(uint32_t address, const uint32_t (&value)[2], CallSite site = CallSite());
void st_shared_16(uint32_t address, const uint32_t (&value)[4], CallSite site = CallSite());

uint8_t ld_global_1(const void* address, CallSite site = CallSite());
uint16_t ld_global_2(const void* address, CallSite site = CallSite());
uint32_t ld_global_4(const void* address, CallSite site = CallSite());
void ld_global_8(uint32_t (&value)[2], const void* address, CallSite site = CallSite());
void ld_global_16(uint32_t (&value)[4], const void* address, CallSite site = CallSite());

inline void prefetch_global(const void*) {}  // there is no cache

void st_global_2(void* address, uint16_t value, CallSite site = CallSite());
void st_global_4(void* address, uint32_t value, CallSite site = CallSite());
void st_global_8(void* address, const uint32_t (&value)[2], CallSite site = CallSite());
void st_global_16(void* address, const uint32_t (&value)[4], CallSite site = CallSite());

uint32_t atom_add_global(void* address, uint32_t value, CallSite site = CallSite());
void red_max_signed_global(void* address, uint32_t value, CallSite site = CallSite());
void red_min_global(void* address, uint32_t value, CallSite site = CallSite());

uint32_t ld_acquire_global_4(const void* address, CallSite site = CallSite());
void wait_global_at_least(const void* address, uint32_t value, CallSite site = CallSite());
void st_release_global_4(void* address, uint32_t value, CallSite site = CallSite());
void red_add_release_global(void* address, uint32_t value, CallSite site = CallSite());
uint32_t atom_add_acq_rel_global(void* address, uint32_t value, CallSite site = CallSite());
void fence_acq_rel_gpu(CallSite site = CallSite());

void cp_async_16_or_zero(bool exists, uint32_t destination_smem, const void* source_gmem, CallSite site = CallSite());

inline void cp_async_commit_group() { ++emu::current->open_copy_group; }

template <int kPending>
inline void cp_async_wait_group() {
  emu::wait_for_copies(kPending);
}

void cp_async_mbarrier_arrive(uint32_t barrier_smem, CallSite site = CallSite());

// ---- matrix.cuh ----

void ldmatrix_x4(uint32_t (&tile)[4], uint32_t row_smem, CallSite site = CallSite());
void ldmatrix_x4_trans(uint32_t (&tile)[4], uint32_t row_smem, CallSite site = CallSite());
void stmatrix_x4(uint32_t row_smem, const uint32_t (&tile)[4], CallSite site = CallSite());

template <class Element>
inline void mma_m16n8k16_f32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             CallSite site = CallSite()) {
  emu::mma_m16n8k16(emu::kInputType<Element>, emu::AccumulatorType::kFloat, d, a, b0, b1, site);
}

void mma_m16n8k16_f16(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, CallSite site = CallSite());

// ---- wgmma.cuh ----

void wgmma_fence(CallSite site = CallSite());
void wgmma_commit_group(CallSite site = CallSite());

template <int kPending>
inline void wgmma_wait_group(CallSite site = CallSite()) {
  emu::wgmma_wait(kPending, site);
}

template <class Element, int kN, OperandMajor kA = OperandMajor::kK, OperandMajor kB = OperandMajor::kK>
inline void wgmma_ss(float (&d)[kN / 2], uint64_t a_descriptor, uint64_t b_descriptor, bool accumulate,
                     CallSite site = CallSite()) {
  static_assert(is_wgmma_width(kN), "8, 16, ... 256 columns");
  static_assert(!kIs8Bit<Element> || (kA == OperandMajor::kK && kB == OperandMajor::kK), "8-bit operands are K-major");
  emu::wgmma({kN, emu::kInputType<Element>, kA == OperandMajor::kMN, kB == OperandMajor::kMN, accumulate, d, nullptr,
              a_descriptor, b_descriptor},
             site);
}

template <class Element, int kN, OperandMajor kB = OperandMajor::kK>
inline void wgmma_rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b_descriptor, bool accumulate,
                     CallSite site = CallSite()) {
  static_assert(!kIs8Bit<Element> && is_wgmma_width(kN), "elements of 16 bits, 8, 16, ... 256 columns");
  emu::wgmma({kN, emu::kInputType<Element>, false, kB == OperandMajor::kMN, accumulate, d, a, 0, b_descriptor}, site);
}

template <int kRegisters>
inline void increase_registers(CallSite site = CallSite()) {
  emu::set_max_registers(kRegisters, site);
}

template <int kRegisters>
inline void decrease_registers(CallSite site = CallSite()) {
  emu::set_max_registers(kRegisters, site);
}

// ---- tma.cuh ----

using TensorMap = TensorMapSpec;  // it stands for the hardware's encoded form

template <Evict = Evict::kNormal>
inline void tma_load_2d(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0, int c1,
                        CallSite site = CallSite()) {
  emu::tma_load(destination_smem, *map, barrier_smem, {c0, c1}, emu::kOwnBlock, site);
}

inline void tma_load_4d(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0, int c1, int c2,
                        int c3, CallSite site = CallSite()) {
  emu::tma_load(destination_smem, *map, barrier_smem, {c0, c1, c2, c3}, emu::kOwnBlock, site);
}

inline void tma_load_5d(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0, int c1, int c2,
                        int c3, int c4, CallSite site = CallSite()) {
  emu::tma_load(destination_smem, *map, barrier_smem, {c0, c1, c2, c3, c4}, emu::kOwnBlock, site);
}

inline void tma_load_4d_multicast(uint32_t destination_smem, const TensorMap* map, uint32_t barrier_smem, int c0,
                                  int c1, int c2, int c3, uint16_t block_mask, CallSite site = CallSite()) {
  emu::tma_load(destination_smem, *map, barrier_smem, {c0, c1, c2, c3}, block_mask, site);
}

template <Evict = Evict::kNormal>
inline void tma_store_2d(const TensorMap* map, uint32_t source_smem, int c0, int c1, CallSite site = CallSite()) {
  emu::tma_store(*map, source_smem, {c0, c1}, site);
}

inline void tma_store_4d(const TensorMap* map, uint32_t source_smem, int c0, int c1, int c2, int c3,
                         CallSite site = CallSite()) {
  emu::tma_store(*map, source_smem, {c0, c1, c2, c3}, site);
}

inline void tma_store_5d(const TensorMap* map, uint32_t source_smem, int c0, int c1, int c2, int c3, int c4,
                         CallSite site = CallSite()) {
  emu::tma_store(*map, source_smem, {c0, c1, c2, c3, c4}, site);
}

void bulk_commit_group(CallSite site = CallSite());

template <int kPending>
inline void bulk_wait_group_read(CallSite site = CallSite()) {
  emu::bulk_wait(kPending, emu::BulkStep::kRead, site);
}

template <int kPending>
inline void bulk_wait_group(CallSite site = CallSite()) {
  emu::bulk_wait(kPending, emu::BulkStep::kComplete, site);
}

// The source is read when the copy lands, which is as late as can be.
void copy_to_block(uint32_t destination_smem, uint32_t source_smem, uint32_t bytes, uint32_t barrier_smem,
                   uint32_t rank, CallSite site = CallSite());

void bulk_reduce_add_f32(void* destination_gmem, uint32_t source_smem, uint32_t bytes, CallSite site = CallSite());

// One lane's fence counts for its warp: the race check knows warps, not lanes.
inline void fence_proxy_async() { ++emu::current->warp->proxy_epoch; }
void fence_proxy_async_global(CallSite site = CallSite());

LaunchStatus encode_tensor_map(TensorMap& map, const TensorMapSpec& spec);

// ---- driver.h ----

// Runs the grid to its end; `stream` has no meaning here.
template <class... Parameters>
LaunchStatus launch_grid(void (*kernel)(Parameters...), const LaunchShape& shape, void* stream,
                         Parameters... arguments) {
  (void)stream;
  if (shape.counter != nullptr) *shape.counter = 0;
  return emu::run_grid(shape, [&] { kernel(arguments...); });
}

}  // namespace ffpa::ptx
