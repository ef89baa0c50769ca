// Fragment maps of m16n8k16, with g = lane / 4 and t = lane % 4. wgmma uses the same maps for each warp's 16 rows.
#pragma once

#include "ptx/emulated/machine/accumulate.h"

namespace ffpa::emu {

void scatter_a_fragment(MmaTile& tile, int lane, const uint32_t* a, InputType type);
void scatter_c_fragment(MmaTile& tile, int lane, const float* d);
void gather_c_fragment(const MmaTile& tile, int lane, float* d);

}  // namespace ffpa::emu
