// The instructions ldmatrix, stmatrix, and mma.sync.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/accumulate.h"
#include "ptx/emulated/machine/call_site.h"

namespace ffpa::emu {

void ldmatrix(uint32_t* tile_registers, int tiles, bool transposed, uint32_t row_address, CallSite site);
void stmatrix(uint32_t row_address, const uint32_t* tile_registers, int tiles, bool transposed, CallSite site);

// `d` points to 4 floats, or to 2 registers of packed halves.
void mma_m16n8k16(InputType input, AccumulatorType accumulator, void* d, const uint32_t* a, uint32_t b0, uint32_t b1,
                  CallSite site);

// Fragment maps of m16n8k16, with g = lane / 4 and t = lane % 4. wgmma uses the same maps for each warp's 16 rows.
void scatter_a_fragment(MmaTile& tile, int lane, const uint32_t* a, InputType type);
void scatter_c_fragment(MmaTile& tile, int lane, const float* d);
void gather_c_fragment(const MmaTile& tile, int lane, float* d);

}  // namespace ffpa::emu
