#include "ptx/emulated/machine/wgmma.h"

#include <algorithm>
#include <cstring>

#include "base/types.h"
#include "ptx/emulated/machine/collective.h"
#include "ptx/emulated/machine/matrix_ops.h"
#include "ptx/emulated/machine/shared_memory.h"
#include "ptx/emulated/machine/tma.h"

namespace ffpa::emu {

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
  WgmmaOperands operands;  // operands of lane 0
  uint32_t a[kWarpSize][4];
  const uint32_t* a_registers[kWarpSize];
  float* accumulators;  // lane 0's pointer: names the AccumulatorsInFlight
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

namespace {

constexpr int kWarpsPerGroup = 4;
constexpr uint32_t kPoisonBits = 0xffffffff;

WgmmaQueue& queue_of(Warp& warp) {
  if (!warp.wgmma) warp.wgmma = std::make_shared<WgmmaQueue>();
  return *warp.wgmma;
}

struct Descriptor {
  uint32_t address, leading_bytes, stride_bytes;
  Swizzle swizzle;
};

Descriptor decode(uint64_t bits) {
  return {uint32_t(bits & 0x3fff) << 4, uint32_t(bits >> 16 & 0x3fff) << 4, uint32_t(bits >> 32 & 0x3fff) << 4,
          Swizzle(bits >> 62)};
}

// Returns element (mn, k)'s address in an operand (PTX manual: "Canonical Layouts"); 8-bit elements are K-major.
uint32_t element_address(const Descriptor& descriptor, bool mn_major, int element_bytes, int mn, int k) {
  const int chunks = descriptor.swizzle == Swizzle::kNone ? 1 : swizzle_bytes(descriptor.swizzle) / 16;
  const uint32_t row_bytes = chunks * 16;
  const int row_elements = 8 * chunks;
  uint32_t offset;
  if (!mn_major) {
    offset = mn % 8 * row_bytes + mn / 8 * descriptor.stride_bytes;
    const uint32_t k_bytes = k * element_bytes;
    offset += descriptor.swizzle == Swizzle::kNone ? k_bytes % 16 + k_bytes / 16 * descriptor.leading_bytes : k_bytes;
  } else if (descriptor.swizzle != Swizzle::kNone) {
    offset = mn % row_elements * 2 + mn / row_elements * descriptor.leading_bytes + k % 8 * row_bytes +
             k / 8 * descriptor.stride_bytes;
  } else {
    offset = mn % 8 * 2 + mn / 8 * descriptor.stride_bytes + k % 8 * row_bytes + k / 8 * descriptor.leading_bytes;
  }
  return swizzled_address(descriptor.address + offset, descriptor.swizzle);
}

int depth_of(InputType input) { return 32 / element_bytes(input); }

// With base offset 0 the swizzle pattern starts where the address bits say it does, so atoms must start there too.
void check_descriptor(uint64_t bits, const char* operand, CallSite site) {
  const Descriptor descriptor = decode(bits);
  const uint32_t atom_bytes = 8 * swizzle_bytes(descriptor.swizzle);
  if (atom_bytes && descriptor.address % atom_bytes >= uint32_t(swizzle_bytes(descriptor.swizzle))) {
    fail("wgmma", site,
         format("descriptor of %s: address 0x%x is not in the first row of a swizzle atom (%u bytes, 8 rows)", operand,
                descriptor.address, atom_bytes));
  }
}

// Reads elements (mn0 … mn0 + count - 1) × (all k of a product) through the async proxy and calls store(mn, k, value).
template <class Store>
void read_operand(Warp& warp, uint64_t bits, bool mn_major, InputType input, int mn0, int count, const char* what,
                  CallSite site, Store store) {
  constexpr uint32_t kChunkBytes = 16;
  const int bytes = element_bytes(input), chunk_elements = int(kChunkBytes) / bytes;  // adjacent in every layout
  const Descriptor descriptor = decode(bits);
  const int outer_count = mn_major ? depth_of(input) : count;
  const int inner_count = mn_major ? count : depth_of(input);
  for (int outer = 0; outer < outer_count; ++outer) {
    for (int inner = 0; inner < inner_count; inner += chunk_elements) {
      const int mn = mn0 + (mn_major ? inner : outer);
      const int k = mn_major ? outer : inner;
      const uint32_t address = element_address(descriptor, mn_major, bytes, mn, k);
      uint8_t chunk[kChunkBytes];
      std::memcpy(chunk, shared_pointer(*warp.block, address, kChunkBytes, kChunkBytes, what, site), kChunkBytes);
      note_read(*warp.block, address, kChunkBytes, warp, kWholeWarp, site, Proxy::kAsync);
      for (int i = 0; i < chunk_elements; ++i) {
        const uint16_t element = bytes == 1 ? chunk[i] : uint16_t(chunk[2 * i] | chunk[2 * i + 1] << 8);
        store(mn_major ? inner + i : outer, mn_major ? outer : inner + i, to_float(input, element));
      }
    }
  }
}

void execute(Warp& warp, QueuedProduct& product) {
  const WgmmaOperands& operands = product.operands;
  const int first_row = warp.index % kWarpsPerGroup * 16;
  MmaTile tile;
  tile.depth = depth_of(operands.input);
  if (operands.a) {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if (std::memcmp(product.a_registers[lane], product.a[lane], sizeof(product.a[lane]))) {
        report_error("wgmma", "a" + to_string(product.site), product.site,
                     format("the A registers of the product at %s were changed before the wait",
                            to_string(product.site).c_str()));
      }
      scatter_a_fragment(tile, lane, product.a[lane], operands.input);
    }
  } else {
    read_operand(warp, operands.a_descriptor, operands.a_is_mn_major, operands.input, first_row, 16, "wgmma A",
                 product.site, [&](int row, int k, float value) { tile.a[row][k] = value; });
  }
  std::vector<float>& values = queue_of(warp).in_flight.at(product.accumulators).values;
  const int per_lane = operands.n / 2;
  for (int column = 0; column < operands.n; column += 8) {
    read_operand(warp, operands.b_descriptor, operands.b_is_mn_major, operands.input, column, 8, "wgmma B",
                 product.site, [&](int n, int k, float value) { tile.b[k][n] = value; });
    const float zeros[4] = {};
    for (int lane = 0; lane < kWarpSize; ++lane) {
      scatter_c_fragment(tile, lane, operands.accumulate ? &values[size_t(lane) * per_lane + column / 2] : zeros);
    }
    multiply_accumulate(tile, AccumulatorType::kFloat, machine->options.accumulation);
    for (int lane = 0; lane < kWarpSize; ++lane) {
      gather_c_fragment(tile, lane, &values[size_t(lane) * per_lane + column / 2]);
    }
    ++machine->report.counters.mma;
  }
}

// Takes the accumulators out of the kernel's registers, and leaves poison: nobody may look at them before the wait.
void take_accumulators(WgmmaQueue& queue, Warp& warp, int per_lane) {
  AccumulatorsInFlight taken;
  taken.values.resize(size_t(kWarpSize) * per_lane);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    taken.registers[lane] = arguments_of<WgmmaOperands>(warp, lane).d;
    std::memcpy(&taken.values[size_t(lane) * per_lane], taken.registers[lane], per_lane * sizeof(float));
    if (machine->options.poison) std::memset(taken.registers[lane], 0xff, per_lane * sizeof(float));
  }
  queue.in_flight[taken.registers[0]] = std::move(taken);
}

void give_back_accumulators(const AccumulatorsInFlight& taken, int per_lane, CallSite site) {
  bool touched = false;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    for (int i = 0; i < per_lane; ++i) touched |= float_bits(taken.registers[lane][i]) != kPoisonBits;
    std::memcpy(taken.registers[lane], &taken.values[size_t(lane) * per_lane], per_lane * sizeof(float));
  }
  if (touched && machine->options.poison) {
    report_error("wgmma", "d" + to_string(site), site,
                 format("the accumulators of the product at %s were written before the wait", to_string(site).c_str()));
  }
}

// The four warps of a group execute one instruction together: each must issue the same ones in the same order.
void compare_with_warpgroup(Warp& warp, WgmmaQueue& queue, const WgmmaOperands& operands, CallSite site) {
  auto& history = warp.block->wgmma_history[warp.index / kWarpsPerGroup];
  if (!history) history = std::make_shared<std::vector<WgmmaRecord>>();
  const WgmmaRecord mine{site, operands.n, operands.a ? 0 : operands.a_descriptor, operands.b_descriptor};
  const size_t position = queue.issued++;
  if (position == history->size()) {
    history->push_back(mine);
    return;
  }
  const WgmmaRecord& theirs = (*history)[position];
  if (theirs.site != mine.site || theirs.n != mine.n || theirs.a_descriptor != mine.a_descriptor ||
      theirs.b_descriptor != mine.b_descriptor) {
    fail("wgmma", site,
         format("another warp of the warpgroup executes the product at %s with other descriptors or another width here",
                to_string(theirs.site).c_str()));
  }
}

}  // namespace

void wgmma(const WgmmaOperands& operands, CallSite site) {
  require_arch(kSm90, "wgmma", site);
  WgmmaOperands mine = operands;
  collective(WarpOp::kWgmma, &mine, site, [&](Warp& warp) {
    if (warp.block->threads % (kWarpSize * kWarpsPerGroup)) {
      fail("wgmma", site, format("a block of %d threads is not made of whole warpgroups", warp.block->threads));
    }
    WgmmaQueue& queue = queue_of(warp);
    QueuedProduct product;
    product.operands = arguments_of<WgmmaOperands>(warp, 0);
    product.accumulators = product.operands.d;
    product.group = queue.open_group;
    product.site = site;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const auto& theirs = arguments_of<WgmmaOperands>(warp, lane);
      if (theirs.b_descriptor != mine.b_descriptor || (!mine.a && theirs.a_descriptor != mine.a_descriptor)) {
        fail("wgmma", site, "the lanes of a warp disagree about a descriptor");
      }
      product.a_registers[lane] = theirs.a;
      if (theirs.a) std::memcpy(product.a[lane], theirs.a, sizeof(product.a[lane]));
    }
    if (!mine.a) check_descriptor(mine.a_descriptor, "A", site);
    check_descriptor(mine.b_descriptor, "B", site);
    compare_with_warpgroup(warp, queue, mine, site);
    if (!queue.in_flight.count(product.accumulators)) {
      if (!queue.fenced) {
        report_error("wgmma", "f" + to_string(site), site,
                     format("no wgmma.fence before the product at %s, whose accumulators the last wait gave back",
                            to_string(site).c_str()));
      }
      take_accumulators(queue, warp, operands.n / 2);
    }
    queue.products.push_back(product);
    ++machine->report.counters.wgmma;
    return After::kContinue;
  });
}

void wgmma_fence(CallSite site) {
  require_arch(kSm90, "wgmma.fence", site);
  collective(WarpOp::kWgmmaFence, nullptr, site, [](Warp& warp) {
    queue_of(warp).fenced = true;
    return After::kContinue;
  });
}

void wgmma_commit_group(CallSite site) {
  require_arch(kSm90, "wgmma.commit_group", site);
  collective(WarpOp::kWgmmaCommit, nullptr, site, [](Warp& warp) {
    ++queue_of(warp).open_group;
    return After::kContinue;
  });
}

void wgmma_wait_group(int pending_groups, CallSite site) {
  require_arch(kSm90, "wgmma.wait_group", site);
  maybe_preempt();
  collective(WarpOp::kWgmmaWait, nullptr, site, [&](Warp& warp) {
    WgmmaQueue& queue = queue_of(warp);
    size_t count = 0;
    while (count < queue.products.size() && queue.products[count].group < queue.open_group - pending_groups) {
      execute(warp, queue.products[count++]);
    }
    const std::vector<QueuedProduct> done(queue.products.begin(), queue.products.begin() + count);
    queue.products.erase(queue.products.begin(), queue.products.begin() + count);
    for (const QueuedProduct& product : done) {
      const auto entry = queue.in_flight.find(product.accumulators);
      const bool still_used =
          std::any_of(queue.products.begin(), queue.products.end(),
                      [&](const QueuedProduct& later) { return later.accumulators == product.accumulators; });
      if (still_used || entry == queue.in_flight.end()) continue;
      give_back_accumulators(entry->second, product.operands.n / 2, product.site);
      queue.in_flight.erase(entry);
    }
    if (queue.products.empty()) queue.fenced = false;
    return After::kContinue;
  });
}

void set_max_registers(int registers, CallSite site) {
  require_arch(kSm90, "setmaxnreg", site);
  collective(WarpOp::kSetMaxRegisters, nullptr, site, [&](Warp&) {
    if (registers % 8 || registers < 24 || registers > 256) {
      fail("setmaxnreg", site, format("%d registers; must be 24, 32, … 256", registers));
    }
    return After::kContinue;
  });
}

void check_wgmma_at_exit(const Block& block) {
  for (const Warp& warp : block.warps) {
    const size_t group = warp.index / kWarpsPerGroup;
    if (group >= block.wgmma_history.size() || !block.wgmma_history[group]) continue;
    const auto& history = *block.wgmma_history[group];
    const size_t issued = warp.wgmma ? warp.wgmma->issued : 0;
    if (issued < history.size()) {
      report_error("wgmma", "x" + to_string(history[issued].site), history[issued].site,
                   format("warp %d did not execute the product at %s, others of its warpgroup did", warp.index,
                          to_string(history[issued].site).c_str()));
    }
    if (warp.wgmma && !warp.wgmma->products.empty()) {
      const CallSite site = warp.wgmma->products.front().site;
      report_error("exit", "w" + to_string(site), site,
                   format("a warp exits with the product at %s not waited for", to_string(site).c_str()));
    }
  }
}

}  // namespace ffpa::emu
