#include <cstring>

#include "base/types.h"
#include "ptx/emulated/ldmatrix.cuh"
#include "ptx/emulated/machine/accumulate.h"
#include "ptx/emulated/machine/collective.h"
#include "ptx/emulated/machine/shared_memory.h"
#include "ptx/emulated/mma.cuh"

namespace ffpa::emu {
namespace {

constexpr int kTileRows = 8;
constexpr uint32_t kTileRowBytes = 16;

void ldmatrix(uint32_t* registers, bool transposed, uint32_t row_address, CallSite site) {
  struct Arguments {
    uint32_t* registers;
    uint32_t row_address;
  } arguments{registers, row_address};
  const Instruction instruction{"ldmatrix", site};
  collective(instruction, &arguments, [&](Warp& warp) {
    SharedInstruction access{instruction, int(kTileRowBytes)};
    uint16_t rows[kWarpSize][kTileRows];
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const SharedRange row{*warp.block, arguments_of<Arguments>(warp, lane).row_address, kTileRowBytes};
      std::memcpy(rows[lane], shared_pointer(row, kTileRowBytes, instruction), kTileRowBytes);
      note_read(row, warp, site);
      access.active_lanes |= 1u << lane;
      access.address[lane] = row.address;
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const int major = lane / 4, minor = 2 * (lane % 4);
      for (int t = 0; t < 4; ++t) {
        const auto& tile = &rows[t * kTileRows];
        arguments_of<Arguments>(warp, lane).registers[t] = transposed
                                                               ? pack_bits(tile[minor][major], tile[minor + 1][major])
                                                               : pack_bits(tile[major][minor], tile[major][minor + 1]);
      }
    }
    count_wavefronts(access);
  });
}

// Register b[r] holds k = 2t + 8·r and the next k, column g.
void scatter_b_fragment(MmaTile& tile, int lane, const uint32_t* b, InputType type) {
  const int g = lane / 4, t = lane % 4;
  for (int r = 0; r < 2; ++r) {
    tile.b[2 * t + 8 * r][g] = to_float(type, low_bits(b[r]));
    tile.b[2 * t + 8 * r + 1][g] = to_float(type, high_bits(b[r]));
  }
}

}  // namespace

// Register a[r] holds row g + 8·(r % 2), k = 2t + 8·(r / 2) and the next k.
void scatter_a_fragment(MmaTile& tile, int lane, const uint32_t* a, InputType type) {
  const int g = lane / 4, t = lane % 4;
  for (int r = 0; r < 4; ++r) {
    float* target = &tile.a[g + 8 * (r % 2)][2 * t + 8 * (r / 2)];
    target[0] = to_float(type, low_bits(a[r]));
    target[1] = to_float(type, high_bits(a[r]));
  }
}

// Value d[2·h + e] belongs to row g + 8·h, column 2t + e.
void scatter_c_fragment(MmaTile& tile, int lane, const float* d) {
  const int g = lane / 4, t = lane % 4;
  for (int value = 0; value < 4; ++value) tile.c[g + 8 * (value / 2)][2 * t + value % 2] = d[value];
}

void gather_c_fragment(const MmaTile& tile, int lane, float* d) {
  const int g = lane / 4, t = lane % 4;
  for (int value = 0; value < 4; ++value) d[value] = tile.c[g + 8 * (value / 2)][2 * t + value % 2];
}

void mma_m16n8k16(InputType input, AccumulatorType accumulator, float* d, const uint32_t* a, uint32_t b0, uint32_t b1,
                  CallSite site) {
  struct Arguments {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
  } arguments{d, a, {b0, b1}};
  collective({"mma.sync", site}, &arguments, [&](Warp& warp) {
    MmaTile tile;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const auto& mine = arguments_of<Arguments>(warp, lane);
      scatter_a_fragment(tile, lane, mine.a, input);
      scatter_b_fragment(tile, lane, mine.b, input);
      scatter_c_fragment(tile, lane, mine.d);
    }
    multiply_accumulate(tile, accumulator, machine->options.accumulation);
    for (int lane = 0; lane < kWarpSize; ++lane) gather_c_fragment(tile, lane, arguments_of<Arguments>(warp, lane).d);
    ++machine->report.counters.mma;
  });
}

}  // namespace ffpa::emu

namespace ffpa::ptx {
using namespace emu;

void ldmatrix_x4(uint32_t (&tile)[4], uint32_t row_smem, CallSite site) { ldmatrix(tile, false, row_smem, site); }
void ldmatrix_x4_trans(uint32_t (&tile)[4], uint32_t row_smem, CallSite site) { ldmatrix(tile, true, row_smem, site); }

void stmatrix_x4(uint32_t row_smem, const uint32_t (&tile)[4], CallSite site) {
  struct Arguments {
    const uint32_t* registers;
    uint32_t row_address;
  } arguments{tile, row_smem};
  const Instruction instruction{"stmatrix", site};
  require_sm90(instruction);
  collective(instruction, &arguments, [&](Warp& warp) {
    SharedInstruction access{instruction, int(kTileRowBytes), kAllLanes};
    for (int lane = 0; lane < kWarpSize; ++lane) {  // each names a row, whose elements four lanes hold
      uint32_t elements[4];
      for (int i = 0; i < 4; ++i) {
        elements[i] = arguments_of<Arguments>(warp, lane % kTileRows * 4 + i).registers[lane / kTileRows];
      }
      const SharedRange row{*warp.block, arguments_of<Arguments>(warp, lane).row_address, kTileRowBytes};
      uint8_t* destination = shared_pointer(row, kTileRowBytes, instruction);
      note_write(row, warp, site);
      std::memcpy(destination, elements, kTileRowBytes);
      access.address[lane] = row.address;
    }
    count_wavefronts(access);
  });
}

// Half accumulators come as two registers, for rows g and g + 8.
void mma_m16n8k16_f16(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, CallSite site) {
  float values[4];
  for (int i = 0; i < 4; ++i) values[i] = to_float(InputType::kHalf, uint16_t(d[i / 2] >> 16 * (i % 2)));
  mma_m16n8k16(InputType::kHalf, AccumulatorType::kHalf, values, a, b0, b1, site);
  for (int h = 0; h < 2; ++h) {
    d[h] = pack_bits(half_from_float(values[2 * h]).bits, half_from_float(values[2 * h + 1]).bits);
  }
}

}  // namespace ffpa::ptx
