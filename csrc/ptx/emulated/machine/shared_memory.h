// Shared memory: addresses, bounds, and the race check.
//
// A 32-bit shared address is an offset from kSmemBase, plus (rank + 1) << 24 when it names another block of the
// cluster (what mapa returns).
#pragma once

#include "ptx/emulated/machine/machine.h"

namespace ffpa::emu {

// The start of dynamic shared memory: sm_90 reserves the first kilobyte. Not 0, so that a forgotten base is caught.
inline constexpr uint32_t kSmemBase = 1024;
inline constexpr uint32_t kOffsetMask = 0xffffff;
inline constexpr int kWholeWarp = 255;  // lane of an access that a collective made for all lanes

Block& block_of(uint32_t address);

// Returns a host pointer to `bytes` bytes of a block's shared memory; fails if they are misaligned or out of bounds.
uint8_t* shared_pointer(Block& block, uint32_t address, uint32_t bytes, uint32_t alignment, const char* what,
                        CallSite site);

enum class Proxy { kGeneric, kAsync };
enum class WriteKind { kGeneric, kAsyncIssue };

// The race check records an access at this moment by `lane` (or kWholeWarp) of `warp`.
void note_read(Block& block, uint32_t address, uint32_t bytes, Warp& warp, int lane, CallSite site,
               Proxy proxy = Proxy::kGeneric);
void note_write(Block& block, uint32_t address, uint32_t bytes, Warp& warp, int lane, CallSite site,
                WriteKind kind = WriteKind::kGeneric);

// From the first call on, a TMA store issued by the lane may read these bytes; from the second on, it no longer does.
void note_bulk_read_begin(Block& block, uint32_t address, uint32_t bytes, Warp& warp, int lane, CallSite site);
void note_bulk_read_end(Block& block, uint32_t address, uint32_t bytes, Warp& warp, int lane, CallSite site);

// Records the end of a copy to another block: whoever writes must have learned of this moment of the TMA unit.
void note_bulk_read_landed(Block& block, uint32_t address, uint32_t bytes, uint32_t landed_at);

// Records that the lane's cp.async of these bytes is complete, for those who know copies_of its warp at this time.
// After a wait of the lane itself, it also counts as an ordinary store made now.
enum class Completion { kTracked, kAwaited };
void note_copy_complete(Block& block, uint32_t address, uint32_t bytes, Warp& warp, int lane, uint32_t copy_time,
                        Completion completion);

// Records that the asynchronous write of these bytes is complete and visible to `writer` as of `time`.
void note_landed(Block& block, uint32_t address, uint32_t bytes, int writer, int lane, uint32_t time,
                 uint32_t sync_epoch);

}  // namespace ffpa::emu
