// Waits for groups of copies whose number is known at run time only.
#pragma once

#include "base/compiler.h"
#include "ptx/instructions.cuh"

namespace ffpa::tile {

// Waits until at most `pending` (0, 2, 4 or 6) of this thread's latest copy groups are in flight.
FFPA_DEVICE void wait_for_copy_groups(int pending) {
  switch (pending) {
    case 2:
      ptx::cp_async_wait_group<2>();
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
