// Emulated side of ptx/native/special_registers.cuh.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/machine.h"
#include "ptx/emulated/machine/shared_memory.h"

namespace ffpa::ptx {

inline int thread_x() { return emu::current->thread; }
inline int thread_x_anew() { return thread_x(); }
inline int block_x() { return int(emu::current->block->index.x); }
inline int block_y() { return int(emu::current->block->index.y); }
inline int block_z() { return int(emu::current->block->index.z); }
inline int grid_x() { return int(emu::machine->shape.grid.x); }
inline int grid_y() { return int(emu::machine->shape.grid.y); }
inline int grid_z() { return int(emu::machine->shape.grid.z); }
inline int lane_id() { return emu::current->index; }
inline uint32_t dynamic_smem() { return emu::kSmemBase; }

}  // namespace ffpa::ptx
