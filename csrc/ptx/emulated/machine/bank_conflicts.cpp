#include <algorithm>

#include "ptx/emulated/machine/shared_memory.h"

namespace ffpa::emu {
namespace {

// Counts wavefronts. Shared memory has 32 banks of 4 bytes. A request of up to 4 bytes per lane is served for all 32
// lanes together, one of 8 bytes in two halves of the warp, one of 16 bytes in four quarters. Each group takes as many
// wavefronts as the busiest bank has distinct words; lanes that name the same word share it.
BankConflicts conflicts_of(const SharedInstruction& access) {
  constexpr int kBanks = 32;
  const int lanes_per_group = access.bytes_per_lane == 16 ? 8 : access.bytes_per_lane == 8 ? 16 : 32;
  BankConflicts result;
  result.executions = 1;
  for (int first = 0; first < kWarpSize; first += lanes_per_group) {
    uint32_t words[kBanks][kWarpSize];
    int word_count[kBanks] = {};
    int busiest = 0;
    for (int lane = first; lane < first + lanes_per_group; ++lane) {
      if (!(access.active_lanes >> lane & 1)) continue;
      for (int byte = 0; byte < access.bytes_per_lane; byte += 4) {
        const uint32_t word = (access.address[lane] + byte) / 4;
        const int bank = word % kBanks;
        uint32_t* end = words[bank] + word_count[bank];
        if (std::find(words[bank], end, word) == end) {
          *end = word;
          ++word_count[bank];
        }
        busiest = std::max(busiest, word_count[bank]);
      }
    }
    result.wavefronts += busiest;
    result.ideal_wavefronts += busiest > 0;
    result.worst_way = std::max(result.worst_way, busiest);
  }
  return result;
}

}  // namespace

void count_wavefronts(const SharedInstruction& access) {
  machine->report.bank_conflicts[access.instruction].add(conflicts_of(access));
}

void log_shared_access(const Instruction& instruction, uint32_t address, int bytes) {
  auto& logs = current->warp->access_logs;
  auto log = std::find_if(logs.begin(), logs.end(),
                          [&](const SharedAccessLog& entry) { return entry.site == instruction.site; });
  if (log == logs.end()) {
    logs.push_back({instruction.site, {}, {}});
    log = logs.end() - 1;
  }
  const size_t execution = log->executions[current->index]++;
  if (execution == log->instructions.size()) log->instructions.push_back({instruction, bytes});
  SharedInstruction& access = log->instructions[execution];
  access.active_lanes |= 1u << current->index;
  access.address[current->index] = address;
}

void flush_access_logs(Warp& warp) {
  for (const SharedAccessLog& log : warp.access_logs) {
    for (const SharedInstruction& access : log.instructions) count_wavefronts(access);
  }
  warp.access_logs.clear();
}

}  // namespace ffpa::emu
