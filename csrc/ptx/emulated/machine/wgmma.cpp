#include <cstring>

#include "ptx/emulated/instructions.cuh"

namespace ffpa::emu {
namespace {

constexpr int kWarpsPerGroup = 4;
constexpr uint32_t kPoisonBits = 0xffffffff;

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
    fail("wgmma", site, "descriptor of %s: address 0x%x is not in the first row of a swizzle atom (%u bytes, 8 rows)",
         operand, descriptor.address, atom_bytes);
  }
}

// Reads elements (mn0 … mn0 + count - 1) × (all k of a product) through the async proxy and calls store(mn, k, value).
template <class Store>
void read_operand(Warp& warp, uint64_t bits, bool mn_major, InputType input, int mn0, int count,
                  const Instruction& instruction, Store store) {
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
      const SharedRange range{*warp.block, address, kChunkBytes};
      std::memcpy(chunk, shared_pointer(range, kChunkBytes, instruction), kChunkBytes);
      note_read(range, warp, instruction.site, Proxy::kAsync);
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
        report_error("wgmma", product.site, "the A registers of the product at %s were changed before the wait",
                     to_string(product.site).c_str());
      }
      scatter_a_fragment(tile, lane, product.a[lane], operands.input);
    }
  } else {
    read_operand(warp, operands.a_descriptor, operands.a_is_mn_major, operands.input, first_row, 16,
                 {"wgmma A", product.site}, [&](int row, int k, float value) { tile.a[row][k] = value; });
  }
  std::vector<float>& values = warp.wgmma.in_flight.at(operands.d).values;
  const int per_lane = operands.n / 2;
  for (int column = 0; column < operands.n; column += 8) {
    read_operand(warp, operands.b_descriptor, operands.b_is_mn_major, operands.input, column, 8,
                 {"wgmma B", product.site}, [&](int n, int k, float value) { tile.b[k][n] = value; });
    const float zeros[4] = {};
    for (int lane = 0; lane < kWarpSize; ++lane) {
      scatter_c_fragment(tile, lane, operands.accumulate ? &values[size_t(lane) * per_lane + column / 2] : zeros);
    }
    multiply_accumulate(tile, AccumulatorType::kFloat);
    for (int lane = 0; lane < kWarpSize; ++lane) {
      gather_c_fragment(tile, lane, &values[size_t(lane) * per_lane + column / 2]);
    }
    ++machine->report.counters.mma;
  }
}

// Takes the accumulators out of the kernel's registers, and leaves poison: nobody may look at them before the wait.
AccumulatorsInFlight take_accumulators(Warp& warp, int per_lane, CallSite site) {
  AccumulatorsInFlight taken{site};
  taken.values.resize(size_t(kWarpSize) * per_lane);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    taken.registers[lane] = arguments_of<WgmmaOperands>(warp, lane).d;
    std::memcpy(&taken.values[size_t(lane) * per_lane], taken.registers[lane], per_lane * sizeof(float));
    std::memset(taken.registers[lane], 0xff, per_lane * sizeof(float));
  }
  return taken;
}

void give_back(const AccumulatorsInFlight& taken) {
  const size_t per_lane = taken.values.size() / kWarpSize;
  bool touched = false;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    for (size_t i = 0; i < per_lane; ++i) touched |= float_bits(taken.registers[lane][i]) != kPoisonBits;
    std::memcpy(taken.registers[lane], &taken.values[lane * per_lane], per_lane * sizeof(float));
  }
  if (touched) {
    report_error("wgmma", taken.site, "the accumulators of the product at %s were written before the wait",
                 to_string(taken.site).c_str());
  }
}

// The four warps of a group execute one instruction together: each must issue the same ones in the same order.
void compare_with_warpgroup(Warp& warp, const WgmmaOperands& operands, CallSite site) {
  std::vector<WgmmaRecord>& history = warp.block->wgmma_history[warp.index / kWarpsPerGroup];
  const WgmmaRecord mine{site, operands.n, operands.a ? 0 : operands.a_descriptor, operands.b_descriptor};
  const size_t position = warp.wgmma.issued++;
  if (position == history.size()) {
    history.push_back(mine);
    return;
  }
  const WgmmaRecord& theirs = history[position];
  if (theirs.site != mine.site || theirs.n != mine.n || theirs.a_descriptor != mine.a_descriptor ||
      theirs.b_descriptor != mine.b_descriptor) {
    fail("wgmma", site,
         "another warp of the warpgroup executes the product at %s with other descriptors or another width here",
         to_string(theirs.site).c_str());
  }
}

}  // namespace

void wgmma(const WgmmaOperands& operands, CallSite site) {
  require_sm90({"wgmma", site});
  WgmmaOperands mine = operands;
  collective({"wgmma.mma_async", site}, &mine, [&](Warp& warp) {
    if (warp.block->threads % (kWarpSize * kWarpsPerGroup)) {
      fail("wgmma", site, "a block of %d threads is not made of whole warpgroups", warp.block->threads);
    }
    WgmmaQueue& queue = warp.wgmma;
    QueuedProduct product;
    product.operands = arguments_of<WgmmaOperands>(warp, 0);
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
    compare_with_warpgroup(warp, mine, site);
    float* const d = product.operands.d;
    if (!queue.in_flight.count(d)) {
      if (!queue.fenced) {
        report_error("wgmma", site,
                     "no wgmma.fence before the product at %s, whose accumulators the last wait gave back",
                     to_string(site).c_str());
      }
      queue.in_flight.emplace(d, take_accumulators(warp, operands.n / 2, site));
    }
    ++queue.in_flight.at(d).products;
    queue.products.push_back(product);
    ++machine->report.counters.wgmma;
  });
}

void wgmma_wait(int pending_groups, CallSite site) {
  maybe_preempt();
  sm90_collective({"wgmma.wait_group", site}, nullptr, [&](Warp& warp) {
    WgmmaQueue& queue = warp.wgmma;
    while (!queue.products.empty() && queue.products.front().group < queue.open_group - pending_groups) {
      QueuedProduct& product = queue.products.front();
      execute(warp, product);
      const auto accumulators = queue.in_flight.find(product.operands.d);
      if (--accumulators->second.products == 0) {
        give_back(accumulators->second);
        queue.in_flight.erase(accumulators);
      }
      queue.products.pop_front();
    }
    if (queue.products.empty()) queue.fenced = false;
  });
}

void set_max_registers(int registers, CallSite site) {
  sm90_collective({"setmaxnreg", site}, nullptr, [&](Warp&) {
    if (registers % 8 || registers < 24 || registers > 256) {
      fail("setmaxnreg", site, "%d registers; must be 24, 32, … 256", registers);
    }
  });
}

void check_wgmma_at_exit(const Block& block) {
  for (const Warp& warp : block.warps) {
    const size_t group = warp.index / kWarpsPerGroup;
    if (group >= block.wgmma_history.size()) continue;
    const std::vector<WgmmaRecord>& history = block.wgmma_history[group];
    if (warp.wgmma.issued < history.size()) {
      const CallSite site = history[warp.wgmma.issued].site;
      report_error("wgmma", site, "warp %d did not execute the product at %s, others of its warpgroup did", warp.index,
                   to_string(site).c_str());
    }
    if (!warp.wgmma.products.empty()) {
      const CallSite site = warp.wgmma.products.front().site;
      report_error("exit", site, "a warp exits with the product at %s not waited for", to_string(site).c_str());
    }
  }
}

}  // namespace ffpa::emu

namespace ffpa::ptx {
using namespace emu;

void wgmma_fence(CallSite site) {
  sm90_collective({"wgmma.fence", site}, nullptr, [](Warp& warp) { warp.wgmma.fenced = true; });
}

void wgmma_commit_group(CallSite site) {
  sm90_collective({"wgmma.commit_group", site}, nullptr, [](Warp& warp) { ++warp.wgmma.open_group; });
}

}  // namespace ffpa::ptx
