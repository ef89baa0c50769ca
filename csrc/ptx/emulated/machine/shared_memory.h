// Shared memory: addresses, bounds, the race check, and bank conflicts.
//
// A 32-bit shared address is an offset from kSmemBase, plus (rank + 1) << 24 when it names another block of the
// cluster (what mapa returns).
#pragma once

#include "ptx/emulated/machine/machine.h"

namespace ffpa::emu {

// The start of dynamic shared memory: sm_90 reserves the first kilobyte. Not 0, so that a forgotten base is caught.
inline constexpr uint32_t kSmemBase = 1024;
inline constexpr uint32_t kOffsetMask = 0xffffff;

Block& block_of(uint32_t address);

struct SharedRange {
  Block& block;
  uint32_t address;  // its rank does not matter: the block is known
  uint32_t bytes;

  uint32_t offset() const { return (address & kOffsetMask) - kSmemBase; }
};

// Returns a host pointer to a range; fails if it is misaligned or out of bounds.
uint8_t* shared_pointer(const SharedRange& range, uint32_t alignment, const Instruction& instruction);

// An Accessor of shared memory is a lane, or stands for all lanes of a warp in a collective.
struct Accessor {
  Accessor(Lane& lane) : warp(*lane.warp), lane(lane.index) {}
  Accessor(Warp& warp) : warp(warp), lane(kWholeWarp) {}

  static constexpr int kWholeWarp = 255;
  Warp& warp;
  int lane;
};

// The race check records an access at this moment; an asynchronous write begins, and is in flight.
void note_read(const SharedRange& range, Accessor by, CallSite site, Proxy proxy = Proxy::kGeneric);
void note_write(const SharedRange& range, Accessor by, CallSite site, Proxy proxy = Proxy::kGeneric);

// Records that an asynchronous write of these bytes begins, which are poison until it lands.
void begin_async_write(const SharedRange& range, CallSite site);

// From the first call on, a TMA store issued by the lane may read these bytes; from the second on, it no longer does.
void note_bulk_read_begin(const SharedRange& range, CallSite site);
void note_bulk_read_end(const SharedRange& range, Lane& lane, CallSite site);

// Records the end of a copy to another block: whoever writes must have learned of this moment of the TMA unit.
void note_bulk_read_landed(const SharedRange& range, uint32_t landed_at);

// Records that the lane's cp.async of these bytes is complete, for those who know copies_of its warp at this time.
// After a wait of the lane itself, it also counts as an ordinary store made now.
enum class Completion { kTracked, kAwaited };
void note_copy_complete(const SharedRange& range, const Lane& lane, uint32_t copy_time, Completion completion);

// Records that the TMA unit's write of these bytes is complete.
void note_landed(const SharedRange& range, uint32_t landed_at);

// Counts the exact wavefronts of one warp-wide access whose addresses are all known (ldmatrix, stmatrix).
void count_wavefronts(const SharedInstruction& access);

// Records the access of the current lane; it is counted with the other lanes' at the warp's next collective.
void log_shared_access(const Instruction& instruction, uint32_t address, int bytes);
void flush_access_logs(Warp& warp);

}  // namespace ffpa::emu
