#include <algorithm>
#include <cmath>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "ptx/emulated/instructions.cuh"

namespace ffpa::emu {
namespace {

// Stands for the exponent of zero: below those of all numbers and of their products.
constexpr int kZeroExponent = -100000;

int exponent_of(float value) { return value == 0 ? kZeroExponent : std::ilogb(value); }

float round_toward_zero(double value) {
  const float rounded = float(value);
  if (std::fabs(double(rounded)) <= std::fabs(value)) return rounded;
  return float_from_bits(float_bits(rounded) - 1);
}

// A Line is a row of A or a column of B.
struct Line {
  Line(const float* first, int distance, int depth) {
    for (int k = 0; k < depth; ++k) {
      const float value = first[k * distance];
      is_finite = is_finite && std::isfinite(value);
      values[k] = value;
      exponents[k] = exponent_of(value);
    }
  }

  bool is_finite = true;
  double values[kMostDepth];
  int exponents[kMostDepth];
};

// Hopper's sums of products of 8-bit elements keep this many bits of a float's fraction.
constexpr int k8BitFraction = 13;

// Takes one step of a tensor core: aligns all products and c to the largest exponent among them, cuts them off `bits`
// bits below it, adds them exactly, and rounds the sum toward zero to float, or to nearest even to half. Where `bits`
// is below a float's precision, it rounds toward zero to that many bits. (This follows the models of arXiv 2511.10909
// and 2512.07004; hardware confirms it for 16-bit elements.)
float fused_dot_add(const Line& a, const Line& b, int first, int end, float c, int bits, AccumulatorType accumulator) {
  if (!std::isfinite(c)) return c;  // the step before has overflowed a half, and these products are finite
  int largest = exponent_of(c);
  for (int k = first; k < end; ++k) largest = std::max(largest, a.exponents[k] + b.exponents[k]);
  if (largest < kZeroExponent / 2) return 0.0f;
  // This is exact: a power of two scales, and a sum has fewer bits than a double. It begins with +0: no sum is -0.
  const double scale = std::ldexp(1.0, bits - largest);
  double sum = 0.0;
  sum += std::trunc(c * scale);
  for (int k = first; k < end; ++k) sum += std::trunc(a.values[k] * b.values[k] * scale);
  const double exact = std::ldexp(sum, largest - bits);
  if (accumulator == AccumulatorType::kHalf) return to_float(from_float<Half>(float(exact)));
  const float rounded = round_toward_zero(exact);
  return bits == k8BitFraction ? float_from_bits(float_bits(rounded) & ~0u << (23 - k8BitFraction)) : rounded;
}

// Infinities and NaN do not depend on the order of additions; a NaN result is the canonical one.
float non_finite_dot_add(const Line& a, const Line& b, int depth, float c) {
  double sum = c;
  for (int k = 0; k < depth; ++k) sum += a.values[k] * b.values[k];
  return std::isnan(sum) ? float_from_bits(0x7fffffff) : float(sum);
}

void accumulate_as_hardware(MmaTile& tile, AccumulatorType accumulator) {
  std::vector<Line> a, b;
  for (int row = 0; row < 16; ++row) a.emplace_back(tile.a[row], 1, tile.depth);
  for (int column = 0; column < 8; ++column) b.emplace_back(&tile.b[0][column], 8, tile.depth);
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float& c = tile.c[row][column];
      if (!a[row].is_finite || !b[column].is_finite || !std::isfinite(c)) {
        c = non_finite_dot_add(a[row], b[column], tile.depth, c);
      } else if (machine->options.accumulation == Accumulation::kAmpere) {
        c = fused_dot_add(a[row], b[column], 0, 8, c, 24, accumulator);
        c = fused_dot_add(a[row], b[column], 8, 16, c, 24, accumulator);
      } else {
        const int bits = tile.depth == kMostDepth ? k8BitFraction : 25;
        c = fused_dot_add(a[row], b[column], 0, tile.depth, c, bits, accumulator);
      }
    }
  }
}

// Adds one row of c at a time in vector registers: this loop is most of the emulator's arithmetic.
void accumulate_plainly(MmaTile& tile, AccumulatorType accumulator) {
  typedef float Row __attribute__((vector_size(8 * sizeof(float))));
  Row b[kMostDepth];
  std::memcpy(b, tile.b, tile.depth * sizeof(Row));
  for (int row = 0; row < 16; ++row) {
    Row c;
    std::memcpy(&c, tile.c[row], sizeof(c));
    for (int k = 0; k < tile.depth; ++k) {
      const float a = tile.a[row][k];
      c += Row{a, a, a, a, a, a, a, a} * b[k];
    }
    std::memcpy(tile.c[row], &c, sizeof(c));
  }
  if (accumulator == AccumulatorType::kFloat) return;
  for (auto& row : tile.c) {
    for (float& value : row) value = to_float(from_float<Half>(value));
  }
}

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

float to_float(InputType type, uint16_t bits) {
  if (type == InputType::kE4M3) return ffpa::to_float(E4M3{uint8_t(bits)});
  if (type == InputType::kE5M2) return ffpa::to_float(E5M2{uint8_t(bits)});
  if (type == InputType::kBFloat16) return ffpa::to_float(BFloat16{bits});
#if defined(__F16C__)
  return _cvtsh_ss(bits);  // gives the same values; in software this would be a third of the time of a whole mma
#else
  return ffpa::to_float(Half{bits});
#endif
}

void multiply_accumulate(MmaTile& tile, AccumulatorType accumulator) {
  if (machine->options.accumulation == Accumulation::kPlain) {
    accumulate_plainly(tile, accumulator);
  } else {
    accumulate_as_hardware(tile, accumulator);
  }
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
    multiply_accumulate(tile, accumulator);
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
    d[h] = pack_bits(from_float<Half>(values[2 * h]).bits, from_float<Half>(values[2 * h + 1]).bits);
  }
}

}  // namespace ffpa::ptx
