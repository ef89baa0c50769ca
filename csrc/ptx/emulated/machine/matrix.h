// Matrix products: the arithmetic of one 16×8×16 product, or 16×8×32 for 8-bit elements, in the ways that
// Options::accumulation names; and wgmma's products, which are queued when issued and computed when waited for.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "ptx/emulated/machine/run.h"

namespace ffpa::emu {

struct Block;

enum class InputType { kHalf, kBFloat16, kE4M3, kE5M2 };
enum class AccumulatorType { kFloat, kHalf };

inline constexpr int kMostDepth = 32;

inline int element_bytes(InputType type) { return type == InputType::kHalf || type == InputType::kBFloat16 ? 2 : 1; }

struct MmaTile {
  int depth = 16;                       // depth k of the product
  alignas(32) float a[16][kMostDepth];  // [row][k]
  alignas(32) float b[kMostDepth][8];   // [k][column]
  alignas(32) float c[16][8];           // [row][column], input and result
};

float to_float(InputType type, uint16_t bits);

// Computes tile.c += tile.a · tile.b. Half accumulators are left as values that a half can hold.
void multiply_accumulate(MmaTile& tile, AccumulatorType accumulator);

// Fragment maps of m16n8k16, with g = lane / 4 and t = lane % 4. wgmma uses the same maps for each warp's 16 rows.
void scatter_a_fragment(MmaTile& tile, int lane, const uint32_t* a, InputType type);
void scatter_c_fragment(MmaTile& tile, int lane, const float* d);
void gather_c_fragment(const MmaTile& tile, int lane, float* d);

struct WgmmaOperands {
  int n;  // columns of B and D
  InputType input;
  bool a_is_mn_major;
  bool b_is_mn_major;
  bool accumulate;
  float* d;           // n / 2 accumulators of the current lane
  const uint32_t* a;  // 4 registers of the current lane, or nullptr if A is in shared memory
  uint64_t a_descriptor;
  uint64_t b_descriptor;
};

// A product that one warp of a warpgroup issued: the others must issue the same.
struct WgmmaRecord {
  CallSite site;
  int n;
  uint64_t a_descriptor, b_descriptor;
};

// The values of an accumulator array while products on it are in flight. The kernel's registers hold poison meanwhile.
struct AccumulatorsInFlight {
  CallSite site;     // place of the first product
  int products = 0;  // number of them that are queued
  float* registers[kWarpSize] = {};
  std::vector<float> values = {};  // [lane][n / 2]
};

struct QueuedProduct {
  WgmmaOperands operands;  // operands of lane 0, whose `d` names the AccumulatorsInFlight
  uint32_t a[kWarpSize][4];
  const uint32_t* a_registers[kWarpSize];
  int group;
  CallSite site;
};

struct WgmmaQueue {
  std::deque<QueuedProduct> products;
  std::map<float*, AccumulatorsInFlight> in_flight;
  int open_group = 0;
  bool fenced = false;
  size_t issued = 0;
};

// Reports warps that executed fewer products than the others of their warpgroup.
void check_wgmma_at_exit(const Block& block);

}  // namespace ffpa::emu
