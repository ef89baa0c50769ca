#include "ptx/emulated/machine/shared_memory.h"

#include "ptx/emulated/machine/tensor_box.h"

namespace ffpa::emu {
namespace {

constexpr uint32_t kWordBytes = 4;

struct WordRange {
  uint32_t first, end;
};

WordRange words_of(uint32_t address, uint32_t bytes) {
  const uint32_t offset = (address & kOffsetMask) - kSmemBase;
  return {offset / kWordBytes, (offset + bytes + kWordBytes - 1) / kWordBytes};
}

// Returns which bytes of word i an access touches. Neighbouring halves of a word may belong to different threads.
uint8_t bytes_in_word(uint32_t address, uint32_t bytes, uint32_t i) {
  if (bytes >= kWordBytes) return 0xf;  // accesses of that size are aligned
  const uint32_t first = (address & kOffsetMask) - kSmemBase - i * kWordBytes;
  return uint8_t(((1u << bytes) - 1) << first);
}

std::string name_of(int warp) {
  if (warp == kAsyncAgent) return "the TMA unit";
  return format("warp %d of block rank %d", machine->warps[warp]->index, machine->warps[warp]->block->rank);
}

// Tells whether the warp has waited for a phase of an mbarrier that tracked the cp.async which wrote the word.
bool knows_copy(const ShadowWord& word, const Warp& warp) {
  return word.copy_time && word.copy_time <= warp.clock.at[copies_of(word.writer)];
}

void remember_read(Block& block, uint32_t i, const Warp& warp, int lane, CallSite site) {
  ShadowWord& word = block.shadow[i];
  const int self = warp.cluster_id;
  block.read_times[i * machine->warps.size() + self] = warp.clock.at[self];
  word.read_site = site;
  // Lanes of one warp have no clocks of their own: the last reading lane is compared with a later writer of the same
  // warp instead. Collectives need no such care, because all lanes have come to them.
  if (lane == kWholeWarp) return;
  const bool second_lane = word.reader == self && word.read_sync_epoch == warp.sync_epoch && word.reader_lane != lane;
  word.reader = uint8_t(self);
  word.reader_lane = uint8_t(second_lane ? kWholeWarp : lane);
  word.read_sync_epoch = warp.sync_epoch;
}

void report_race(const char* what, const char* missing, uint32_t word, Warp& warp, CallSite site, int other,
                 CallSite other_site) {
  report_error("race", what + to_string(other_site) + to_string(site), site,
               format("%s: shared offset %u, %s at %s against %s at %s (%s)", what, word * kWordBytes,
                      name_of(warp.cluster_id).c_str(), to_string(site).c_str(), name_of(other).c_str(),
                      to_string(other_site).c_str(), missing));
}

void report_write_under_copy(const Block& block, uint32_t word, Warp& warp, CallSite site) {
  report_race("write to bytes that a copy to another block may still read", "its phase not waited for", word, warp,
              site, kAsyncAgent, block.shadow[word].read_site);
}

void report_write_under_bulk_store(const Block& block, uint32_t word, Warp& warp, CallSite site) {
  bool found = false;
  for (const BulkStore& store : machine->bulk_stores) {
    const WordRange source = words_of(store.source, box_bytes(store.spec));
    const bool reads_it =
        store.step == BulkStep::kIssued && store.lane->block == &block && source.first <= word && word < source.end;
    if (!reads_it) continue;
    found = true;
    report_race("write to bytes that a TMA store may still read", "bulk_wait_group_read missing", word, warp, site,
                store.lane->warp->cluster_id, store.site);
  }
  if (!found) report_write_under_copy(block, word, warp, site);
}

}  // namespace

Block& block_of(uint32_t address) {
  const uint32_t rank_plus_one = address >> 24;
  if (rank_plus_one == 0 || rank_plus_one > machine->blocks.size()) return *current->block;
  return *machine->blocks[rank_plus_one - 1];
}

uint8_t* shared_pointer(Block& block, uint32_t address, uint32_t bytes, uint32_t alignment, const char* what,
                        CallSite site) {
  const uint32_t offset = (address & kOffsetMask) - kSmemBase;
  if (address % alignment) {
    fail("misaligned", site, format("%s: shared address 0x%x is not a multiple of %u", what, address, alignment));
  }
  if (offset >= block.smem_bytes || offset + bytes > block.smem_bytes) {
    fail("smem-oob", site,
         format("%s: bytes %d to %d of a shared memory of %u", what, int(offset), int(offset + bytes),
                block.smem_bytes));
  }
  return block.smem.data() + offset;
}

void note_read(Block& block, uint32_t address, uint32_t bytes, Warp& warp, int lane, CallSite site, Proxy proxy) {
  if (!machine->options.check_races) return;
  const int self = warp.cluster_id;
  const WordRange words = words_of(address, bytes);
  for (uint32_t i = words.first; i < words.end; ++i) {
    ShadowWord& word = block.shadow[i];
    const bool known = knows_copy(word, warp);
    if (word.in_flight && !known) {
      report_race("read of bytes that an asynchronous copy still writes", "wait missing", i, warp, site, word.writer,
                  word.write_site);
    } else if (word.writer != kNobody && !known && (word.written_bytes & bytes_in_word(address, bytes, i))) {
      if (word.writer != self) {
        if (word.write_time > warp.clock.at[word.writer]) {
          report_race("read after write", "no barrier between", i, warp, site, word.writer, word.write_site);
        }
      } else if (word.write_sync_epoch == warp.sync_epoch && word.writer_lane != lane) {
        report_race("read after write by another lane", "no __syncwarp between", i, warp, site, word.writer,
                    word.write_site);
      }
      if (proxy == Proxy::kAsync && word.generic_write && word.writer < kAsyncAgent &&
          machine->warps[word.writer]->proxy_epoch <= word.write_proxy_epoch) {
        report_race("read through the async proxy of a generic write", "fence.proxy.async missing", i, warp, site,
                    word.writer, word.write_site);
      }
    }
    remember_read(block, i, warp, lane, site);
  }
}

void note_write(Block& block, uint32_t address, uint32_t bytes, Warp& warp, int lane, CallSite site, WriteKind kind) {
  if (!machine->options.check_races) return;
  const int self = warp.cluster_id;
  const size_t warp_count = machine->warps.size();
  const WordRange words = words_of(address, bytes);
  for (uint32_t i = words.first; i < words.end; ++i) {
    ShadowWord& word = block.shadow[i];
    const bool known = knows_copy(word, warp);
    if (word.in_flight && !known) {
      report_race("write to bytes that an asynchronous copy still writes", "wait missing", i, warp, site, word.writer,
                  word.write_site);
    } else if (word.writer != kNobody && word.writer != self && !known &&
               word.write_time > warp.clock.at[word.writer] &&
               (word.written_bytes & bytes_in_word(address, bytes, i))) {
      report_race("write after write", "no barrier between", i, warp, site, word.writer, word.write_site);
    }
    if (word.bulk_reads) {
      report_write_under_bulk_store(block, i, warp, site);
    } else if (word.copied_time > warp.clock.at[kAsyncAgent]) {
      report_write_under_copy(block, i, warp, site);
    }
    uint32_t* read_times = &block.read_times[i * warp_count];
    for (size_t reader = 0; reader < warp_count; ++reader) {
      if (int(reader) == self || read_times[reader] <= warp.clock.at[reader]) continue;
      report_race(kind == WriteKind::kAsyncIssue ? "asynchronous write after read" : "write after read",
                  "no barrier between", i, warp, site, int(reader), word.read_site);
      read_times[reader] = 0;
    }
    if (lane != kWholeWarp && word.reader == self && word.read_sync_epoch == warp.sync_epoch &&
        word.reader_lane != lane) {
      report_race("write after read by another lane", "no __syncwarp between", i, warp, site, self, word.read_site);
      word.reader = kNobody;
    }
    word.writer = uint8_t(self);
    word.writer_lane = uint8_t(lane);
    word.written_bytes = bytes_in_word(address, bytes, i);
    word.write_time = warp.clock.at[self];
    word.write_sync_epoch = warp.sync_epoch;
    word.write_proxy_epoch = warp.proxy_epoch;
    word.write_site = site;
    word.copy_time = 0;
    word.in_flight = kind == WriteKind::kAsyncIssue;
    word.generic_write = kind == WriteKind::kGeneric;
  }
}

void note_bulk_read_begin(Block& block, uint32_t address, uint32_t bytes, Warp& warp, int lane, CallSite site) {
  if (!machine->options.check_races) return;
  note_read(block, address, bytes, warp, lane, site, Proxy::kAsync);
  const WordRange words = words_of(address, bytes);
  for (uint32_t i = words.first; i < words.end; ++i) ++block.shadow[i].bulk_reads;
}

// Ends the read of a TMA store: a later writer must have learned of this moment.
void note_bulk_read_end(Block& block, uint32_t address, uint32_t bytes, Warp& warp, int lane, CallSite site) {
  if (!machine->options.check_races) return;
  const WordRange words = words_of(address, bytes);
  for (uint32_t i = words.first; i < words.end; ++i) {
    --block.shadow[i].bulk_reads;
    remember_read(block, i, warp, lane, site);
  }
}

void note_bulk_read_landed(Block& block, uint32_t address, uint32_t bytes, uint32_t landed_at) {
  if (!machine->options.check_races) return;
  const WordRange words = words_of(address, bytes);
  for (uint32_t i = words.first; i < words.end; ++i) {
    --block.shadow[i].bulk_reads;
    block.shadow[i].copied_time = landed_at;
  }
}

void note_copy_complete(Block& block, uint32_t address, uint32_t bytes, Warp& warp, int lane, uint32_t copy_time,
                        Completion completion) {
  if (!machine->options.check_races) return;
  const WordRange words = words_of(address, bytes);
  for (uint32_t i = words.first; i < words.end; ++i) {
    ShadowWord& word = block.shadow[i];
    // A warp that knew of the copy from an mbarrier may have overwritten the word before the lane's own wait.
    if (!word.in_flight || word.writer != warp.cluster_id || word.writer_lane != lane) continue;
    word.copy_time = copy_time;
    if (completion == Completion::kTracked) continue;
    word.in_flight = false;
    word.write_time = warp.clock.at[warp.cluster_id];
    word.write_sync_epoch = warp.sync_epoch;
  }
}

void note_landed(Block& block, uint32_t address, uint32_t bytes, int writer, int lane, uint32_t time,
                 uint32_t sync_epoch) {
  if (!machine->options.check_races) return;
  const WordRange words = words_of(address, bytes);
  for (uint32_t i = words.first; i < words.end; ++i) {
    ShadowWord& word = block.shadow[i];
    word.in_flight = false;
    word.generic_write = false;
    word.writer = uint8_t(writer);
    word.writer_lane = uint8_t(lane);
    word.written_bytes = 0xf;
    word.write_time = time;
    word.write_sync_epoch = sync_epoch;
  }
}

}  // namespace ffpa::emu
