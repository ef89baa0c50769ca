// Emulated side of ptx/convert.cuh.
#pragma once

#include <cstdint>

#include "base/types.h"

namespace ffpa::ptx {

template <class Element>
inline uint32_t pack(float low, float high) {
  return pack_bits(from_float<Element>(low).bits, from_float<Element>(high).bits);
}

template <class Element>
inline void unpack(uint32_t packed, float& low, float& high) {
  low = to_float(Element{low_bits(packed)});
  high = to_float(Element{high_bits(packed)});
}

}  // namespace ffpa::ptx
