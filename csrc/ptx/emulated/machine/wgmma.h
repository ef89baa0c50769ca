// wgmma: products that are queued when issued and computed when waited for.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "ptx/emulated/machine/report.h"
#include "ptx/emulated/machine/run.h"
#include "ptx/emulated/wgmma.cuh"

namespace ffpa::emu {

struct Block;

// A product that one warp of a warpgroup issued: the others must issue the same.
struct WgmmaRecord {
  CallSite site;
  int n;
  uint64_t a_descriptor, b_descriptor;
};

// The values of an accumulator array while products on it are in flight. The kernel's registers hold poison meanwhile.
struct AccumulatorsInFlight {
  float* registers[kWarpSize];
  std::vector<float> values;  // [lane][n / 2]
};

struct QueuedProduct {
  WgmmaOperands operands;  // operands of lane 0, whose `d` names the AccumulatorsInFlight
  uint32_t a[kWarpSize][4];
  const uint32_t* a_registers[kWarpSize];
  int group;
  CallSite site;
};

struct WgmmaQueue {
  std::vector<QueuedProduct> products;
  std::map<float*, AccumulatorsInFlight> in_flight;
  int open_group = 0;
  bool fenced = false;
  size_t issued = 0;
};

// Reports warps that executed fewer products than the others of their warpgroup.
void check_wgmma_at_exit(const Block& block);

}  // namespace ffpa::emu
