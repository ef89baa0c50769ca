#include "ptx/emulated/machine/matrix_ops.h"

#include <cstring>

#include "base/types.h"
#include "ptx/emulated/machine/collective.h"
#include "ptx/emulated/machine/shared_memory.h"

namespace ffpa::emu {
namespace {

constexpr int kTileRows = 8;
constexpr uint32_t kTileRowBytes = 16;

struct MatrixArguments {
  uint32_t* registers;
  uint32_t row_address;
};

using Tile = uint16_t[kTileRows][kTileRows];

// Returns the place in an 8×8 tile of register value `half` of `lane`.
uint16_t& element(Tile& tile, int lane, int half, bool transposed) {
  const int major = lane / 4;
  const int minor = 2 * (lane % 4) + half;
  return transposed ? tile[minor][major] : tile[major][minor];
}

}  // namespace

void ldmatrix(uint32_t* tile_registers, int tiles, bool transposed, uint32_t row_address, CallSite site) {
  MatrixArguments arguments{tile_registers, row_address};
  collective(WarpOp::kLdmatrix, &arguments, site, [&](Warp& warp) {
    SharedInstruction access{"ldmatrix", site, int(kTileRowBytes), 0, {}};
    for (int t = 0; t < tiles; ++t) {
      Tile tile;
      for (int row = 0; row < kTileRows; ++row) {
        const int lane = t * kTileRows + row;
        const uint32_t address = arguments_of<MatrixArguments>(warp, lane).row_address;
        std::memcpy(tile[row], shared_pointer(*warp.block, address, kTileRowBytes, kTileRowBytes, "ldmatrix", site),
                    kTileRowBytes);
        note_read(*warp.block, address, kTileRowBytes, warp, kWholeWarp, site);
        access.active_lanes |= 1u << lane;
        access.address[lane] = address;
      }
      for (int lane = 0; lane < kWarpSize; ++lane) {
        arguments_of<MatrixArguments>(warp, lane).registers[t] =
            pack_bits(element(tile, lane, 0, transposed), element(tile, lane, 1, transposed));
      }
    }
    count_wavefronts(access);
    ++machine->report.counters.ldmatrix;
    return After::kContinue;
  });
}

void stmatrix(uint32_t row_address, const uint32_t* tile_registers, int tiles, bool transposed, CallSite site) {
  require_arch(kSm90, "stmatrix", site);
  MatrixArguments arguments{const_cast<uint32_t*>(tile_registers), row_address};
  collective(WarpOp::kStmatrix, &arguments, site, [&](Warp& warp) {
    SharedInstruction access{"stmatrix", site, int(kTileRowBytes), 0, {}};
    for (int t = 0; t < tiles; ++t) {
      Tile tile;
      for (int lane = 0; lane < kWarpSize; ++lane) {
        const uint32_t packed = arguments_of<MatrixArguments>(warp, lane).registers[t];
        element(tile, lane, 0, transposed) = low_bits(packed);
        element(tile, lane, 1, transposed) = high_bits(packed);
      }
      for (int row = 0; row < kTileRows; ++row) {
        const int lane = t * kTileRows + row;
        const uint32_t address = arguments_of<MatrixArguments>(warp, lane).row_address;
        uint8_t* destination = shared_pointer(*warp.block, address, kTileRowBytes, kTileRowBytes, "stmatrix", site);
        note_write(*warp.block, address, kTileRowBytes, warp, kWholeWarp, site);
        std::memcpy(destination, tile[row], kTileRowBytes);
        access.active_lanes |= 1u << lane;
        access.address[lane] = address;
      }
    }
    count_wavefronts(access);
    ++machine->report.counters.stmatrix;
    return After::kContinue;
  });
}

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

namespace {

// Register b[r] holds k = 2t + 8·r and the next k, column g.
void scatter_b_fragment(MmaTile& tile, int lane, const uint32_t* b, InputType type) {
  const int g = lane / 4, t = lane % 4;
  for (int r = 0; r < 2; ++r) {
    tile.b[2 * t + 8 * r][g] = to_float(type, low_bits(b[r]));
    tile.b[2 * t + 8 * r + 1][g] = to_float(type, high_bits(b[r]));
  }
}

// Half accumulators come as two registers, for rows g and g + 8.
void unpack_halves(const uint32_t* packed, float* d) {
  for (int h = 0; h < 2; ++h) {
    d[2 * h] = to_float(InputType::kHalf, low_bits(packed[h]));
    d[2 * h + 1] = to_float(InputType::kHalf, high_bits(packed[h]));
  }
}

void pack_halves(const float* d, uint32_t* packed) {
  for (int h = 0; h < 2; ++h) {
    packed[h] = pack_bits(half_from_float(d[2 * h]).bits, half_from_float(d[2 * h + 1]).bits);
  }
}

struct MmaArguments {
  void* d;
  const uint32_t* a;
  uint32_t b[2];
};

}  // namespace

void mma_m16n8k16(InputType input, AccumulatorType accumulator, void* d, const uint32_t* a, uint32_t b0, uint32_t b1,
                  CallSite site) {
  MmaArguments arguments{d, a, {b0, b1}};
  collective(WarpOp::kMma, &arguments, site, [&](Warp& warp) {
    const bool half_accumulators = accumulator == AccumulatorType::kHalf;
    MmaTile tile;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      auto& mine = arguments_of<MmaArguments>(warp, lane);
      scatter_a_fragment(tile, lane, mine.a, input);
      scatter_b_fragment(tile, lane, mine.b, input);
      float values[4];
      if (half_accumulators) unpack_halves(static_cast<uint32_t*>(mine.d), values);
      scatter_c_fragment(tile, lane, half_accumulators ? values : static_cast<float*>(mine.d));
    }
    multiply_accumulate(tile, accumulator, machine->options.accumulation);
    for (int lane = 0; lane < kWarpSize; ++lane) {
      auto& mine = arguments_of<MmaArguments>(warp, lane);
      float values[4];
      gather_c_fragment(tile, lane, half_accumulators ? values : static_cast<float*>(mine.d));
      if (half_accumulators) pack_halves(values, static_cast<uint32_t*>(mine.d));
    }
    ++machine->report.counters.mma;
    return After::kContinue;
  });
}

}  // namespace ffpa::emu
