#include "ptx/emulated/machine/shared_memory.h"

#include <algorithm>
#include <cstring>

namespace ffpa::emu {
namespace {

constexpr uint32_t kWordBytes = 4;

// Calls visit(number, shadow) for the words of a range, if races are checked. Ranges are made of whole words.
template <class Visit>
void for_each_word(const SharedRange& range, Visit visit) {
  if (!machine->options.check_races) return;
  const uint32_t first = range.offset() / kWordBytes, end = first + range.bytes / kWordBytes;
  for (uint32_t i = first; i < end; ++i) visit(i, range.block.shadow[i]);
}

std::string name_of(int warp) {
  if (warp == kAsyncAgent) return "the TMA unit";
  return format("warp %d of block rank %d", machine->warps[warp]->index, machine->warps[warp]->block->rank);
}

// Tells whether the warp has waited for a phase of an mbarrier that tracked the cp.async which wrote the word.
bool knows_copy(const ShadowWord& word, const Warp& warp) {
  return word.copy_time && word.copy_time <= warp.clock.at[copies_of(word.writer)];
}

void remember_read(Block& block, uint32_t i, Accessor by, CallSite site) {
  ShadowWord& word = block.shadow[i];
  const int self = by.warp.cluster_id;
  block.read_times[i * machine->warps.size() + self] = by.warp.clock.at[self];
  word.read_site = site;
  // Lanes of one warp have no clocks of their own: the last reading lane is compared with a later writer of the same
  // warp instead. Collectives need no such care, because all lanes have come to them.
  if (by.lane == Accessor::kWholeWarp) return;
  const bool second_lane =
      word.reader == self && word.read_sync_epoch == by.warp.sync_epoch && word.reader_lane != by.lane;
  word.reader = uint8_t(self);
  word.reader_lane = uint8_t(second_lane ? Accessor::kWholeWarp : by.lane);
  word.read_sync_epoch = by.warp.sync_epoch;
}

// An access to a word, as a race report needs it.
struct WordAccess {
  uint32_t word;
  const Warp& warp;
  CallSite site;

  void report_race(const char* what, const char* missing, int other, CallSite other_site) const {
    machine->report.add({"race", what + to_string(other_site) + to_string(site),
                         format("%s: shared offset %u, %s at %s against %s at %s (%s)", what, word * kWordBytes,
                                name_of(warp.cluster_id).c_str(), to_string(site).c_str(), name_of(other).c_str(),
                                to_string(other_site).c_str(), missing),
                         site});
  }

  void report_write_under_copy(const ShadowWord& shadow) const {
    report_race("write to bytes that a copy to another block may still read", "its phase not waited for", kAsyncAgent,
                shadow.read_site);
  }
};

void report_write_under_bulk_store(const Block& block, const WordAccess& access) {
  bool found = false;
  for (const BulkStore& store : machine->bulk_stores) {
    const uint32_t from_source = access.word * kWordBytes - (store.source - kSmemBase);
    const bool reads_it =
        store.step == BulkStep::kIssued && store.lane->block == &block && from_source < box_bytes(store.spec);
    if (!reads_it) continue;
    found = true;
    access.report_race("write to bytes that a TMA store may still read", "bulk_wait_group_read missing",
                       store.lane->warp->cluster_id, store.site);
  }
  if (!found) access.report_write_under_copy(block.shadow[access.word]);
}

}  // namespace

Block& block_of(uint32_t address) {
  const uint32_t rank_plus_one = address >> 24;
  if (rank_plus_one == 0 || rank_plus_one > machine->blocks.size()) return *current->block;
  return *machine->blocks[rank_plus_one - 1];
}

uint8_t* shared_pointer(const SharedRange& range, uint32_t alignment, const Instruction& instruction) {
  const uint32_t offset = range.offset();
  const uint32_t limit = range.block.smem_bytes;
  if (range.address % alignment) {
    fail("misaligned", instruction.site, "%s: shared address 0x%x is not a multiple of %u", instruction.name,
         range.address, alignment);
  }
  if (offset >= limit || offset + range.bytes > limit) {
    fail("smem-oob", instruction.site, "%s: bytes %d to %d of a shared memory of %u", instruction.name, int(offset),
         int(offset + range.bytes), limit);
  }
  return range.block.smem.data() + offset;
}

void note_read(const SharedRange& range, Accessor by, CallSite site, Proxy proxy) {
  const Warp& warp = by.warp;
  for_each_word(range, [&](uint32_t i, const ShadowWord& word) {
    const auto report_race = [&](const char* what, const char* missing) {
      WordAccess{i, warp, site}.report_race(what, missing, word.writer, word.write_site);
    };
    const bool known = knows_copy(word, warp);
    if (word.in_flight && !known) {
      report_race("read of bytes that an asynchronous copy still writes", "wait missing");
    } else if (word.writer != kNobody && !known) {
      if (word.writer != warp.cluster_id) {
        if (word.write_time > warp.clock.at[word.writer]) report_race("read after write", "no barrier between");
      } else if (word.write_sync_epoch == warp.sync_epoch && word.writer_lane != by.lane) {
        report_race("read after write by another lane", "no __syncwarp between");
      }
      if (proxy == Proxy::kAsync && word.generic_write && word.writer < kAsyncAgent &&
          machine->warps[word.writer]->proxy_epoch <= word.write_proxy_epoch) {
        report_race("read through the async proxy of a generic write", "fence.proxy.async missing");
      }
    }
    remember_read(range.block, i, by, site);
  });
}

void note_write(const SharedRange& range, Accessor by, CallSite site, Proxy proxy) {
  const Warp& warp = by.warp;
  const int self = warp.cluster_id;
  const size_t warp_count = machine->warps.size();
  for_each_word(range, [&](uint32_t i, ShadowWord& word) {
    const WordAccess access{i, warp, site};
    const bool known = knows_copy(word, warp);
    if (word.in_flight && !known) {
      access.report_race("write to bytes that an asynchronous copy still writes", "wait missing", word.writer,
                         word.write_site);
    } else if (word.writer != kNobody && word.writer != self && !known &&
               word.write_time > warp.clock.at[word.writer]) {
      access.report_race("write after write", "no barrier between", word.writer, word.write_site);
    }
    if (word.bulk_reads) {
      report_write_under_bulk_store(range.block, access);
    } else if (word.copied_time > warp.clock.at[kAsyncAgent]) {
      access.report_write_under_copy(word);
    }
    uint32_t* read_times = &range.block.read_times[i * warp_count];
    for (size_t reader = 0; reader < warp_count; ++reader) {
      if (int(reader) == self || read_times[reader] <= warp.clock.at[reader]) continue;
      access.report_race(proxy == Proxy::kAsync ? "asynchronous write after read" : "write after read",
                         "no barrier between", int(reader), word.read_site);
      read_times[reader] = 0;
    }
    if (by.lane != Accessor::kWholeWarp && word.reader == self && word.read_sync_epoch == warp.sync_epoch &&
        word.reader_lane != by.lane) {
      access.report_race("write after read by another lane", "no __syncwarp between", self, word.read_site);
      word.reader = kNobody;
    }
    word.writer = uint8_t(self);
    word.writer_lane = uint8_t(by.lane);
    word.write_time = warp.clock.at[self];
    word.write_sync_epoch = warp.sync_epoch;
    word.write_proxy_epoch = warp.proxy_epoch;
    word.write_site = site;
    word.copy_time = 0;
    word.in_flight = proxy == Proxy::kAsync;
    word.generic_write = proxy == Proxy::kGeneric;
  });
}

void begin_async_write(const SharedRange& range, CallSite site) {
  note_write(range, *current, site, Proxy::kAsync);
  std::memset(range.block.smem.data() + range.offset(), 0xff, range.bytes);
}

void note_bulk_read_begin(const SharedRange& range, CallSite site) {
  note_read(range, *current, site, Proxy::kAsync);
  for_each_word(range, [](uint32_t, ShadowWord& word) { ++word.bulk_reads; });
}

// Ends the read of a TMA store: a later writer must have learned of this moment.
void note_bulk_read_end(const SharedRange& range, Lane& lane, CallSite site) {
  for_each_word(range, [&](uint32_t i, ShadowWord& word) {
    --word.bulk_reads;
    remember_read(range.block, i, lane, site);
  });
}

void note_bulk_read_landed(const SharedRange& range, uint32_t landed_at) {
  for_each_word(range, [&](uint32_t, ShadowWord& word) {
    --word.bulk_reads;
    word.copied_time = landed_at;
  });
}

void note_copy_complete(const SharedRange& range, const Lane& lane, uint32_t copy_time, Completion completion) {
  const Warp& warp = *lane.warp;
  for_each_word(range, [&](uint32_t, ShadowWord& word) {
    // A warp that knew of the copy from an mbarrier may have overwritten the word before the lane's own wait.
    if (!word.in_flight || word.writer != warp.cluster_id || word.writer_lane != lane.index) return;
    word.copy_time = copy_time;
    if (completion == Completion::kTracked) return;
    word.in_flight = false;
    word.write_time = warp.clock.at[warp.cluster_id];
    word.write_sync_epoch = warp.sync_epoch;
  });
}

void note_landed(const SharedRange& range, uint32_t landed_at) {
  for_each_word(range, [&](uint32_t, ShadowWord& word) {
    word.in_flight = false;
    word.generic_write = false;
    word.writer = uint8_t(kAsyncAgent);
    word.writer_lane = Accessor::kWholeWarp;
    word.write_time = landed_at;
    word.write_sync_epoch = 0;
  });
}

// Shared memory has 32 banks of 4 bytes. A request of up to 4 bytes per lane is served for all 32
// lanes together, one of 8 bytes in two halves of the warp, one of 16 bytes in four quarters. Each group takes as many
// wavefronts as the busiest bank has distinct words; lanes that name the same word share it.
void count_wavefronts(const SharedInstruction& access) {
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
  machine->report.bank_conflicts[access.instruction].add(result);
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
