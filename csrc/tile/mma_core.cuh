// The core of the mma.sync kernels of large head dims: 8 warps bring tiles of two matrices with cp.async, and multiply
// them. A warp has 64 rows and a quarter of the columns of a tile of 128 rows × kColumns. A step is 32 of the common
// dimension; lines of memory run along it or across it:
//
//   A   [128 rows][32 of the step], or [32 of the step][128 rows]
//   B   [kColumns][32 of the step], with columns where DealtFragments has them, or [32 of the step][kColumns]
//
// The slots of a ring (tile/stage_ring.cuh) hold one step each; products whose slots are alike take turns in one ring.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "tile/fragments.cuh"
#include "tile/multiply.cuh"
#include "tile/smem_layout.cuh"
#include "tile/stage_ring.cuh"
#include "tile/tile_copy.cuh"

namespace ffpa::tile {

enum class Lines { kAlong, kAcross };

class DealtRowLayout {
 public:
  FFPA_HOST_DEVICE constexpr explicit DealtRowLayout(int row_bytes) : layout_(row_bytes) {}
  FFPA_HOST_DEVICE constexpr uint32_t offset(int row, int chunk) const {
    return layout_.offset(DealtFragments::place_of(row), chunk);
  }

 private:
  RowLayout layout_;
};

template <class Element, int kTileColumns, Lines kLinesA, Lines kLinesB>
class MmaCore {
 public:
  static constexpr int kColumns = kTileColumns;
  static constexpr int kThreads = 256;
  static constexpr int kRows = 128;
  static constexpr int kStep = 32;
  static constexpr int kStages = 4;
  static constexpr int kWarpRows = 64, kWarpColumns = kColumns / 4;
  static constexpr int kM = kWarpRows / 16, kN = kWarpColumns / 8;  // A fragments of rows, B fragments of columns
  static_assert(kColumns % 64 == 0, "columns of a warp come in pairs of fragments");

  using Ring = StageRing<kThreads>;
  static constexpr uint32_t kBytesA = kRows * kStep * 2;
  static constexpr uint32_t kSlotBytes = kBytesA + kColumns * kStep * 2;
  static constexpr uint32_t kSmemBytes = kStages * kSlotBytes + Ring::kBarrierBytes;

  using Sums = Accumulator<float>[kM][kN];

  FFPA_DEVICE explicit MmaCore(int thread = ptx::thread_x()) : thread_(thread), lane_(int(unsigned(thread) % 32)) {
    const Coordinate a = kLinesA == Lines::kAlong ? ldmatrix_a(lane_) : ldmatrix_a_trans(lane_);
    const Coordinate b = kLinesB == Lines::kAlong ? ldmatrix_b_pair(lane_) : ldmatrix_b_pair_trans(lane_);
    constexpr RowLayout kA = layout_a(), kB = layout_b();
    a_offset_ = kLinesA == Lines::kAlong ? kA.offset(warp_row() + a.row, a.column)
                                         : kA.moved(kA.offset(a.row, a.column), 0, warp_row() / kChunkElements);
    b_offset_ =
        kBytesA + (kLinesB == Lines::kAlong ? kB.offset(warp_column() + b.row, b.column) : kB.offset(b.row, b.column));
  }

  // Makes the ring at the start of shared memory. Every thread calls this first; it ends with a barrier of the block.
  static FFPA_DEVICE Ring make_ring() {
    const uint32_t slots_smem = ptx::dynamic_smem();
    const Ring ring(slots_smem + kStages * kSlotBytes, slots_smem, kStages, kSlotBytes);
    ring.init(ptx::thread_x());
    ptx::sync_block();
    return ring;
  }

  FFPA_DEVICE int lane() const { return lane_; }
  FFPA_DEVICE int warp_row() const { return thread_ / 32 / 4 * kWarpRows; }        // first row of the warp
  FFPA_DEVICE int warp_column() const { return thread_ / 32 % 4 * kWarpColumns; }  // first one, in B's stored order

  // Starts the copies of a step. The windows give origin and stride only; exists(line, chunk) says what is there, and
  // the rest becomes zeros.
  template <class ExistsA, class ExistsB>
  FFPA_DEVICE void bring(Ring& ring, const GmemWindow& a, const ExistsA& exists_a, const GmemWindow& b,
                         const ExistsB& exists_b) const {
    const uint32_t slot = ring.begin_fill();
    if constexpr (kLinesA == Lines::kAlong) {
      copy_chunks_async<kRows, kStep, kThreads>(slot, layout_a(), a, thread_, exists_a, ptx::CallSite());
    } else {
      copy_chunks_async<kStep, kRows, kThreads>(slot, layout_a(), a, thread_, exists_a, ptx::CallSite());
    }
    if constexpr (kLinesB == Lines::kAlong) {
      copy_chunks_async<kColumns, kStep, kThreads>(slot + kBytesA, DealtRowLayout(kStep * 2), b, thread_, exists_b,
                                                   ptx::CallSite());
    } else {
      copy_chunks_async<kStep, kColumns, kThreads>(slot + kBytesA, layout_b(), b, thread_, exists_b, ptx::CallSite());
    }
    ring.end_fill();
  }

  // Does the same with rows of A that lie anywhere: row_at(row) gives the address of a row.
  template <class RowAt, class ExistsA, class ExistsB>
  FFPA_DEVICE void bring_rows(Ring& ring, const RowAt& row_at, const ExistsA& exists_a, const GmemWindow& b,
                              const ExistsB& exists_b) const {
    static_assert(kLinesA == Lines::kAlong && kLinesB == Lines::kAlong, "a step is columns of either");
    const uint32_t slot = ring.begin_fill();
    copy_rows_async<kRows, kStep, kThreads>(slot, layout_a(), row_at, thread_, exists_a, ptx::CallSite());
    copy_chunks_async<kColumns, kStep, kThreads>(slot + kBytesA, DealtRowLayout(kStep * 2), b, thread_, exists_b,
                                                 ptx::CallSite());
    ring.end_fill();
  }

  // Computes sums += A · B over `steps` steps; bring_next() brings the step that is ahead() further, if there is one.
  template <class BringNext>
  FFPA_DEVICE void multiply(Ring& ring, Sums& sums, int steps, const BringNext& bring_next) const {
    bool is_first = true;
    const auto next_step = [&] {
      bring_next();
      const uint32_t slot = is_first ? ring.begin_use() : ring.begin_next_use();
      is_first = false;
      return slot;
    };
    const auto load_a = [&](uint32_t (&a)[4], uint32_t slot, int m, int depth) {
      if (kLinesA == Lines::kAlong) {
        ptx::ldmatrix_x4(a, layout_a().moved(slot + a_offset_, m * 16, depth * 2));
      } else {
        ptx::ldmatrix_x4_trans(a, layout_a().moved(slot + a_offset_, depth * 16, m * 2));
      }
    };
    const auto load_b = [&](uint32_t (&b)[4], uint32_t slot, int depth, int pair) {
      if (kLinesB == Lines::kAlong) {
        ptx::ldmatrix_x4(b, layout_b().moved(slot + b_offset_, pair * 16, depth * 2));
      } else {
        ptx::ldmatrix_x4_trans(
            b, layout_b().moved(slot + b_offset_, depth * 16, warp_column() / kChunkElements + pair * 2));
      }
    };
    add_products<Element, kStep / 16>(sums, steps, next_step, [&] { ring.end_use(); }, load_a, load_b);
  }

 private:
  FFPA_HOST_DEVICE static constexpr RowLayout layout_a() {
    return RowLayout((kLinesA == Lines::kAlong ? kStep : kRows) * 2);
  }
  FFPA_HOST_DEVICE static constexpr RowLayout layout_b() {
    return RowLayout((kLinesB == Lines::kAlong ? kStep : kColumns) * 2);
  }

  int thread_, lane_;
  uint32_t a_offset_, b_offset_;  // byte offsets in a slot where this lane's ldmatrix begins
};

}  // namespace ffpa::tile
