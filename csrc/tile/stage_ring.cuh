// A ring of 1 … 4 buffers ("stages") that copies fill ahead of their use. The length is known at run time only: the
// index lives in a register, and the wait, whose operand is part of the instruction, is a uniform four-way branch.
#pragma once

#include <cstdint>

#include "base/compiler.h"
#include "ptx/async_copy.cuh"

namespace ffpa::tile {

inline constexpr int kMaxStages = 4;

// The stage of step 0, 1, 2, …, without a division.
class StageRing {
 public:
  FFPA_DEVICE StageRing(int stages, uint32_t stage_bytes) : stages_(stages), stage_bytes_(stage_bytes) {}

  FFPA_DEVICE int index() const { return index_; }

  // Byte offset of the stage from the first one.
  FFPA_DEVICE uint32_t offset() const { return uint32_t(index_) * stage_bytes_; }

  // Changes each time the ring comes round: the parity that an mbarrier wait takes.
  FFPA_DEVICE uint32_t parity() const { return parity_; }

  FFPA_DEVICE void advance() {
    ++index_;
    if (index_ == stages_) {
      index_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  int stages_;
  uint32_t stage_bytes_;
  int index_ = 0;
  uint32_t parity_ = 0;
};

// Waits until at most `pending` (0 … 4 or 6) of this thread's latest copy groups are in flight; any other value waits
// for all. A ring of s stages that commits one group a step, s - 1 steps ahead, has the current step's bytes after
// wait_for_copies(s - 1) if the group of step + s - 1 is committed before the wait, after wait_for_copies(s - 2) if
// not.
FFPA_DEVICE void wait_for_copies(int pending) {
  switch (pending) {
    case 1:
      ptx::cp_async_wait_group<1>();
      break;
    case 2:
      ptx::cp_async_wait_group<2>();
      break;
    case 3:
      ptx::cp_async_wait_group<3>();
      break;
    case 4:
      ptx::cp_async_wait_group<4>();
      break;
    case 6:
      ptx::cp_async_wait_group<6>();
      break;
    default:
      ptx::cp_async_wait_group<0>();
      break;
  }
}

}  // namespace ffpa::tile
