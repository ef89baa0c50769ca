// Goes over an array in registers by one copy of the code. An instruction names its registers, so a loop over such an
// array is unrolled: where its body is long, the copies do not fit the instruction cache, and warps wait for their
// instructions.
#pragma once

#include "base/compiler.h"

namespace ffpa::tile {

// Calls move(a number of the array, its part's number) for the part that has this number.
template <int kPart, int kFirst = 0, int kCount, class Move>
FFPA_DEVICE void move_part(float (&numbers)[kCount], int part, const Move& move) {
  if constexpr (kFirst < kCount) {
    if (part * kPart == kFirst) {
      FFPA_UNROLL
      for (int i = 0; i < kPart; ++i) move(numbers[kFirst + i], i);
    } else {
      move_part<kPart, kFirst + kPart>(numbers, part, move);
    }
  }
}

// Calls function(part, numbers of the part) for parts of kPart numbers, one after the other, in registers of their own:
// two moves a number.
template <int kPart, int kCount, class Function>
FFPA_DEVICE void for_parts(float (&numbers)[kCount], const Function& function) {
  static_assert(kCount % kPart == 0);
  FFPA_NO_UNROLL
  for (int part = 0; part < kCount / kPart; ++part) {
    float own[kPart];
    move_part<kPart>(numbers, part, [&](float number, int i) { own[i] = number; });
    function(part, own);
    move_part<kPart>(numbers, part, [&](float& number, int i) { number = own[i]; });
  }
}

}  // namespace ffpa::tile
