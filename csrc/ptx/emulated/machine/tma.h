// TMA loads, and copies to another block.
#pragma once

#include <cstdint>

#include "ptx/emulated/machine/call_site.h"
#include "ptx/tensor_map_spec.h"

namespace ffpa::emu {

inline constexpr uint16_t kOwnBlock = 0;  // block mask that means the own block only

// `coordinates` has spec.rank entries, innermost first.
void tma_load(uint32_t destination, const TensorMapSpec& spec, uint32_t barrier, const int* coordinates,
              int coordinate_count, uint16_t block_mask, CallSite site);

// Copies from the own block's shared memory to that of block `rank`, in bulk.
void copy_to_block(uint32_t destination, uint32_t source, uint32_t bytes, uint32_t barrier, uint32_t rank,
                   CallSite site);

// Returns where the swizzle puts the byte that would lie at `address`.
uint32_t swizzled_address(uint32_t address, Swizzle swizzle);

// Returns nullptr, or why cuTensorMapEncodeTiled would refuse the description.
const char* problem_with_tensor_map(const TensorMapSpec& spec);

void fence_proxy_async();

}  // namespace ffpa::emu
