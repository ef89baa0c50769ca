// The core of the Hopper kernels: one warp brings tiles of two matrices by TMA, two warpgroups multiply them.
//
// Everything moves in boxes of 64 × 64 16-bit elements. A box consists of atoms of the 128-byte swizzle (8 rows of 128
// bytes each), whatever its tensor, and whichever way wgmma reads it. A step is 64 of the common dimension:
//
//   A   kBoxesA of 64 rows, the same number for each warpgroup: [64 rows][64 of the step], or the other way round
//
//   B   kBoxesB of 64 columns: [64 columns][64 of the step], or the other way round
//
// The slots of the ring hold one step each. Each slot has mbarriers: `full` says that all boxes have landed, `empty`
// that no warp reads them any more; `landed` comes before `full` where the producer still writes rows of zeros.
//
// Blocks of a cluster can share the boxes of B: each block brings a part of them for all blocks. The blocks then go
// through the same steps, and a slot is empty when no warp of any of them reads it.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "tile/smem_layout.cuh"

namespace ffpa::tile {

inline constexpr int kBox = 64;  // rows and columns of a box
inline constexpr uint32_t kBoxRowBytes = kBox * 2;
inline constexpr uint32_t kBoxBytes = kBox * kBoxRowBytes;
inline constexpr uint32_t kAtomBytes = 8 * kBoxRowBytes;

inline constexpr int kConsumerGroups = 2;
inline constexpr int kGroupThreads = 128, kGroupWarps = kGroupThreads / 32;
inline constexpr int kCoreThreads = (1 + kConsumerGroups) * kGroupThreads;
inline constexpr int kConsumerWarps = kConsumerGroups * kGroupWarps;

// Major says along which of its dimensions a box is contiguous.
using Major = ptx::OperandMajor;

// All threads of all blocks of the cluster meet.
FFPA_DEVICE void meet_cluster(ptx::CallSite site = ptx::CallSite()) {
  ptx::sync_warp(site);
  ptx::cluster_arrive(site);
  ptx::cluster_wait(site);
}

template <int kBoxesOfA, int kBoxesOfB, int kSlots, int kBlocksThatShare = 1, int kReadingGroups = kConsumerGroups>
struct BoxRing {
  static constexpr int kBoxesA = kBoxesOfA;
  static constexpr int kBoxesB = kBoxesOfB;
  static constexpr int kStages = kSlots;
  static constexpr int kClusterBlocks = kBlocksThatShare;
  static constexpr int kOwnBoxesB = kBoxesB / kClusterBlocks;  // boxes of B that one block brings
  static_assert(kBoxesB % kClusterBlocks == 0, "each block of a cluster brings as many boxes");
  static constexpr uint32_t kSlotBytes = (kBoxesA + kBoxesB) * kBoxBytes;
  static constexpr uint32_t kBytes = kStages * kSlotBytes;
  static constexpr uint32_t kBarrierBytes = 3 * kStages * 8;

  uint32_t slots_smem;
  uint32_t barriers_smem;

  FFPA_DEVICE uint32_t slot(int i) const { return slots_smem + i * kSlotBytes; }
  FFPA_DEVICE uint32_t full(int i) const { return barriers_smem + i * 8; }
  FFPA_DEVICE uint32_t empty(int i) const { return barriers_smem + (kStages + i) * 8; }
  FFPA_DEVICE uint32_t landed(int i) const { return barriers_smem + (2 * kStages + i) * 8; }

  // One thread calls this, before all threads meet. So many warps bring steps.
  FFPA_DEVICE void init(int producers = 1) const {
    FFPA_NO_UNROLL
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(full(i), producers);
      ptx::mbarrier_init(empty(i), kClusterBlocks * kReadingGroups * kGroupThreads / 32);
      ptx::mbarrier_init(landed(i), producers);
    }
    ptx::fence_mbarrier_init();
  }

  // All threads of all blocks call this after init and, where blocks share, before one ends that others write to.
  FFPA_DEVICE void meet() const {
    if constexpr (kClusterBlocks == 1) {
      ptx::sync_block();
    } else {
      meet_cluster();
    }
  }
};

// The place of one role in the ring; each role goes round on its own.
template <class Ring>
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;

  FFPA_DEVICE void advance() {
    if (++slot == Ring::kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// What one of several warps brings of a step: so many bytes, whose copies start(boxes_smem, barrier) starts.
template <class Start>
struct PartOfStep {
  uint32_t bytes;
  Start start;
};
template <class Start>
FFPA_DEVICE PartOfStep<Start> part_of_step(uint32_t bytes, const Start& start) {
  return {bytes, start};
}

// The warp that brings steps, all of its lanes together; one of them issues the copies. That lane is elected: the
// compiler does not know that `lane == 0` is a single lane, and puts a loop around each copy (dQ took 7% longer).
//
// Where kWarps warps bring steps, each brings a part of each.
template <class Ring, int kWarps = 1>
class BoxProducer {
  static constexpr int kRowsA = Ring::kBoxesA * kBox;

 public:
  FFPA_DEVICE BoxProducer(const Ring& ring, int lane, int warp = 0) : ring_(ring), lane_(lane), warp_(warp) {}

  // load(boxes_smem, barrier) starts the copies of all boxes of a step, to consecutive addresses (of the boxes of B it
  // copies those that this block brings for the whole cluster). `boxes_b` is the number of boxes of B, where a product
  // needs fewer than a slot has; `rows_b` is the number of their rows, where they are lower than kBox; `rows_a` counts
  // the rows of all boxes of A, where not all are copied. Where several warps bring steps, all lanes call load() before
  // the slot is free, which returns a PartOfStep.
  template <class Load>
  FFPA_DEVICE void bring(const Load& load, int boxes_b = Ring::kBoxesB, int rows_b = kBox, int rows_a = kRowsA) {
    start(load, ring_.full(at_.slot), bytes_of(boxes_b, rows_b, rows_a));
    at_.advance();
  }

  // Brings a step as bring() does, with zeros in those rows of B's boxes whose bit in `live` is 0: a NaN that lies
  // there would survive the zero it is multiplied with. Where the boxes lie side by side for kTogether rows at a time,
  // these are adjacent: [rows / kTogether][box][kTogether].
  template <int kTogether = 0, class Load>
  FFPA_DEVICE void bring_live_rows(uint64_t live, const Load& load, int boxes_b = Ring::kBoxesB, int rows_b = kBox) {
    if (live == ~uint64_t{0}) return bring(load, boxes_b, rows_b);
    start(load, ring_.landed(at_.slot), bytes_of(boxes_b, rows_b));
    ptx::sync_warp();
    if (is_first()) {
      ptx::mbarrier_wait(ring_.landed(at_.slot), landed_parities_ >> at_.slot & 1);
      landed_parities_ ^= 1 << at_.slot;
      constexpr int kChunks = kBoxRowBytes / 16;
      for (int row = lane_ / kChunks; row < rows_b; row += 32 / kChunks) {
        if (live >> row & 1) continue;
        FFPA_NO_UNROLL
        for (int box = 0; box < boxes_b; ++box) {
          const int of_slot =
              kTogether == 0 ? box * rows_b + row : row_of_steps<max_of(kTogether, 1)>(row, box, boxes_b);
          ptx::st_shared_16(
              ring_.slot(at_.slot) + (Ring::kBoxesA * kBox + of_slot) * kBoxRowBytes + lane_ % kChunks * 16,
              {0, 0, 0, 0});
        }
      }
    }
    end_writes();
  }

  // Brings a step of zeros, for a product over nothing.
  FFPA_DEVICE void bring_zeros() {
    // Only one lane waits: the others may be rounds ahead of it, and a parity tells only neighbouring rounds apart.
    if (lane_ == 0) ptx::mbarrier_wait(ring_.empty(at_.slot), at_.parity ^ 1);
    ptx::sync_warp();
    if (is_first()) {
      FFPA_NO_UNROLL
      for (uint32_t offset = lane_ * 16; offset < Ring::kSlotBytes; offset += 32 * 16) {
        ptx::st_shared_16(ring_.slot(at_.slot) + offset, {0, 0, 0, 0});
      }
    }
    end_writes();
  }

 private:
  FFPA_DEVICE bool is_first() const { return kWarps == 1 || warp_ == 0; }

  // Starts the copies of a step, `bytes` bytes, or the warp's part of them, as soon as its slot is free.
  template <class Load>
  FFPA_DEVICE void start(const Load& load, uint32_t barrier, uint32_t bytes) const {
    if constexpr (kWarps > 1) {
      const auto part = load();
      ptx::mbarrier_wait(ring_.empty(at_.slot), at_.parity ^ 1);
      if (ptx::elect_one()) {
        ptx::mbarrier_arrive_expect_tx(barrier, part.bytes);
        part.start(ring_.slot(at_.slot), barrier);
      }
    } else if (ptx::elect_one()) {
      ptx::mbarrier_wait(ring_.empty(at_.slot), at_.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(barrier, bytes);
      load(ring_.slot(at_.slot), barrier);
    }
  }

  // The slot is full: all lanes have written what no copy brings.
  FFPA_DEVICE void end_writes() {
    ptx::fence_proxy_async();
    ptx::sync_warp();
    if (lane_ == 0) ptx::mbarrier_arrive(ring_.full(at_.slot));
    at_.advance();
  }

  template <int kTogether>
  static FFPA_DEVICE int row_of_steps(int row, int box, int boxes) {
    return (row / kTogether * boxes + box) * kTogether + row % kTogether;
  }

  static FFPA_DEVICE uint32_t bytes_of(int boxes_b, int rows_b, int rows_a = kRowsA) {
    return (rows_a + boxes_b * rows_b) * kBoxRowBytes;
  }

  const Ring ring_;
  int lane_, warp_;
  RingPosition<Ring> at_;
  uint32_t landed_parities_ = 0;  // parity of each slot's `landed` barrier, one bit a slot
};

// Returns the wgmma descriptor of boxes that lie `box_bytes` apart.
FFPA_DEVICE uint64_t boxes_descriptor(uint32_t boxes_smem, uint32_t box_bytes = kBoxBytes) {
  return ptx::wgmma_descriptor(boxes_smem, box_bytes, kAtomBytes, Swizzle::k128Bytes);
}

// Takes one warp of a multiplying warpgroup slot after slot through a ring that no other block reads; a product may
// take any number of slots.
template <class Ring>
class SlotReader {
  static_assert(Ring::kClusterBlocks == 1, "arrivals are the block's own");

 public:
  FFPA_DEVICE SlotReader(const Ring& ring, int lane) : ring_(ring), lane_(lane) {}

  // Returns the descriptor of the next slot's boxes, once they have landed.
  FFPA_DEVICE uint64_t next(uint32_t box_bytes = kBoxBytes) {
    ptx::mbarrier_wait(ring_.full(at_.slot), at_.parity);
    const uint64_t boxes = boxes_descriptor(ring_.slot(at_.slot), box_bytes);
    at_.advance();
    return boxes;
  }

  // Gives slots back, in the order in which they were used. All lanes call this.
  FFPA_DEVICE void release(int slots = 1) {
    ptx::sync_warp();
    FFPA_UNROLL
    for (int i = 0; i < slots; ++i) {
      if (lane_ == 0) ptx::mbarrier_arrive(ring_.empty(released_.slot));
      released_.advance();
    }
  }

  // Gives the next slots back unread, each once it has landed.
  FFPA_DEVICE void pass(int slots) {
    FFPA_NO_UNROLL
    for (int i = 0; i < slots; ++i) {
      next();
      release();
    }
  }

 private:
  const Ring ring_;
  int lane_;
  RingPosition<Ring> at_, released_;
};

// One of the warpgroups that multiply.
template <class Ring>
class BoxConsumer {
 public:
  // `group` is the index of this warpgroup among those that multiply.
  FFPA_DEVICE BoxConsumer(const Ring& ring, int group, int lane) : ring_(ring), group_(group), lane_(lane) {}

  // Computes sums [kBlocks · 64 × kColumns of the warpgroup] = A · B over `steps` steps (at least one), or adds A · B
  // to the sums where `accumulate` is set.
  template <class Element, int kColumns, Major kA, Major kB, int kBlocks>
  FFPA_DEVICE void multiply(float (&sums)[kBlocks][kColumns / 2], int steps, bool accumulate = false) {
    static_assert(kColumns <= Ring::kBoxesB * kBox, "the boxes of B hold all columns");
    static_assert(kBlocks * kConsumerGroups == Ring::kBoxesA, "the warpgroups share the boxes of A");
    FFPA_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      begin_step<Element, kColumns, kA, kB>(sums, accumulate || step > 0);
      if constexpr (kGivesBackAtOnce) {
        ptx::wgmma_wait_group<0>();
        release(slot_before(1));
      } else {
        ptx::wgmma_wait_group<1>();  // the products of the previous step are done
        if (step > 0) release(slot_before(2));
      }
    }
    if constexpr (!kGivesBackAtOnce) {
      ptx::wgmma_wait_group<0>();
      release(slot_before(1));
    }
  }

  // Gives the next slots back unread, each once it has landed.
  FFPA_DEVICE void pass(int steps) {
    FFPA_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      ptx::mbarrier_wait(ring_.full(at_.slot), at_.parity);
      at_.advance();
      release(slot_before(1));
    }
  }

 private:
  static constexpr int kWidest = 256;  // most columns of one instruction

  // In a ring of three, a slot held until the products of the next step are done is a third of the ring, and the copies
  // would have no time to land. Giving it back at once leaves the tensor cores to the other warpgroup for a moment.
  static constexpr bool kGivesBackAtOnce = Ring::kStages <= 3;

  // One loop body holds the products, and no other code touches the sums: ptxas then leaves the products asynchronous.
  template <class Element, int kColumns, Major kA, Major kB, int kBlocks>
  FFPA_DEVICE void begin_step(float (&sums)[kBlocks][kColumns / 2], bool accumulate) {
    // The bytes between multiples of 16 of the common dimension: 16 elements along a row, or 16 rows.
    constexpr uint32_t kNextA = kA == Major::kK ? 32 : 2 * kAtomBytes, kNextB = kB == Major::kK ? 32 : 2 * kAtomBytes;
    // A descriptor holds an address in units of 16 bytes, so the boxes and depths that follow are reached by additions.
    const uint64_t a = boxes_descriptor(ring_.slot(at_.slot) + group_ * kBlocks * kBoxBytes);
    const uint64_t b = boxes_descriptor(ring_.slot(at_.slot) + Ring::kBoxesA * kBoxBytes);
    ptx::mbarrier_wait(ring_.full(at_.slot), at_.parity);
    ptx::wgmma_fence();
    FFPA_UNROLL
    for (int depth = 0; depth < kBox / 16; ++depth) {
      FFPA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        add_product<Element, kColumns, kA, kB>(sums[block], a + (block * kBoxBytes + depth * kNextA) / 16,
                                               b + depth * kNextB / 16, accumulate || depth > 0);
      }
    }
    ptx::wgmma_commit_group();
    at_.advance();
  }

  // A product wider than one instruction takes two instructions, the first over whole boxes.
  template <class Element, int kColumns, Major kA, Major kB>
  static FFPA_DEVICE void add_product(float (&sums)[kColumns / 2], uint64_t a, uint64_t b, bool accumulate) {
    if constexpr (kColumns <= kWidest) {
      ptx::wgmma_ss<Element, kColumns, kA, kB>(sums, a, b, accumulate);
    } else {
      constexpr int kFirst = 3 * kBox;
      using First = float[kFirst / 2];
      using Second = float[(kColumns - kFirst) / 2];
      ptx::wgmma_ss<Element, kFirst, kA, kB>(reinterpret_cast<First&>(sums[0]), a, b, accumulate);
      ptx::wgmma_ss<Element, kColumns - kFirst, kA, kB>(reinterpret_cast<Second&>(sums[kFirst / 2]), a,
                                                        b + kFirst / kBox * kBoxBytes / 16, accumulate);
    }
  }

  // Returns the slot that was used `steps` steps ago.
  FFPA_DEVICE int slot_before(int steps) const {
    return at_.slot >= steps ? at_.slot - steps : at_.slot + Ring::kStages - steps;
  }

  FFPA_DEVICE void release(int slot) const {
    ptx::sync_warp();
    if constexpr (Ring::kClusterBlocks == 1) {
      if (lane_ == 0) ptx::mbarrier_arrive(ring_.empty(slot));
    } else {
      if (lane_ < Ring::kClusterBlocks) ptx::mbarrier_arrive_remote(ring_.empty(slot), lane_);
    }
  }

  const Ring ring_;
  int group_, lane_;
  RingPosition<Ring> at_;
};

// C fragments of a warp, 16 rows × kBox columns, packed as [fragment][half of rows].
using PackedRows = uint32_t[kBox / 4];

inline constexpr int kStoredRows = 16;  // rows of a warp, and of a box of the map that they are stored through

// Writes a warp's rows to global memory, 16 rows at a time: through the warp's own shared memory and TMA. The rows go
// to its kParts parts in turn. No warp waits for another one.
template <int kParts>
class RowStores {
  static constexpr uint32_t kPartBytes = kStoredRows * kBoxRowBytes;

 public:
  static constexpr uint32_t kBytes = kParts * kPartBytes;

  FFPA_DEVICE RowStores(uint32_t smem, int lane) : smem_(smem), lane_(lane) {}

  // All lanes call this. One lane calls send(rows_smem), which starts the copy to the place of the rows.
  template <class Send>
  FFPA_DEVICE void store(const PackedRows& packed, const Send& send) {
    constexpr RowLayout kLayout(kBoxRowBytes);
    const uint32_t part_smem = smem_ + part_ * kPartBytes;
    part_ = (part_ + 1) % kParts;
    if (lane_ == 0) ptx::bulk_wait_group_read<kParts - 1>();  // the copy has read the rows that lay in this part
    ptx::sync_warp();
    FFPA_UNROLL
    for (int n = 0; n < kBox / 8; n += 2) {  // matrices: rows 0 … 7 and 8 … 15 of fragment n, then of the next
      ptx::stmatrix_x4(part_smem + kLayout.offset(lane_ % 16, n + lane_ / 16),
                       {packed[2 * n], packed[2 * n + 1], packed[2 * n + 2], packed[2 * n + 3]});
    }
    ptx::fence_proxy_async();
    ptx::sync_warp();
    if (lane_ == 0) {
      send(part_smem);
      ptx::bulk_commit_group();
    }
  }

  // Waits until all rows are in global memory.
  FFPA_DEVICE void wait() const {
    if (lane_ == 0) ptx::bulk_wait_group<0>();
    ptx::sync_warp();
  }

 private:
  uint32_t smem_;
  int lane_;
  uint32_t part_ = 0;  // the part to fill next
};

// Gives each warp its role by its number in the block: one warp of the first warpgroup runs produce(), or kProducers of
// them run produce(warp); the warps of the other warpgroups run consume(warpgroup, warp in it). Each role gets the
// registers that Config sets for it.
template <class Config, int kProducers = 1, class Produce, class Consume>
FFPA_DEVICE void run_roles(int warp, const Produce& produce, const Consume& consume) {
  if (warp < kGroupWarps) {
    ptx::decrease_registers<Config::kProducerRegisters>();
    if constexpr (kProducers == 1) {
      if (warp == 0) produce();
    } else {
      if (warp < kProducers) produce(warp);
    }
  } else {
    ptx::increase_registers<Config::kConsumerRegisters>();
    consume(warp / kGroupWarps - 1, warp % kGroupWarps);
  }
}

// Returns which of the warpgroups that multiply the thread is in, found anew: what comes of it is then computed where
// it is needed, and takes no registers (thread_x_anew()). The shuffle tells the compiler: one value for the warp.
FFPA_DEVICE int consumer_group_anew() { return ptx::shfl_idx(ptx::thread_x_anew() / kGroupThreads, 0) - 1; }

}  // namespace ffpa::tile
