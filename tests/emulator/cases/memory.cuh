// Cases for ptx/native/memory.cuh.
#pragma once

#include "cases/case.h"
#include "ptx/instructions.cuh"

namespace ffpa::cases {

// Sizes from 4 on go from global to shared memory and, after a __syncwarp, from the opposite lane's place to the
// output.

FFPA_KERNEL(32, 1) void memory_1_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  ptx::st_global_4(output + lane, ptx::ld_global_1(reinterpret_cast<const uint8_t*>(input) + lane));
}

FFPA_KERNEL(32, 1) void memory_2_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  const uint16_t value = ptx::ld_global_2(reinterpret_cast<const uint16_t*>(input) + 31 - lane);
  ptx::st_global_2(reinterpret_cast<uint16_t*>(output) + lane, value);
}

FFPA_KERNEL(32, 1) void memory_4_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  const uint32_t smem = ptx::dynamic_smem();
  ptx::st_shared_4(smem + lane * 4, ptx::ld_global_4(input + lane));
  ptx::sync_warp();
  ptx::st_global_4(output + lane, ptx::ld_shared_4(smem + (31 - lane) * 4));
}

FFPA_KERNEL(32, 1) void prefetch_kernel(const uint32_t* input, uint32_t* output) {
  ptx::prefetch_global(input);
  ptx::st_global_4(output + ptx::lane_id(), ptx::ld_global_4(input + ptx::lane_id()));
}

FFPA_KERNEL(32, 1) void memory_8_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  const uint32_t smem = ptx::dynamic_smem();
  uint32_t value[2];
  ptx::ld_global_8(value, input + lane * 2);
  ptx::st_shared_8(smem + lane * 8, value);
  ptx::sync_warp();
  ptx::ld_shared_8(value, smem + (31 - lane) * 8);
  ptx::st_global_8(output + lane * 2, value);
}

FFPA_KERNEL(32, 1) void memory_16_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  const uint32_t smem = ptx::dynamic_smem();
  uint32_t value[4];
  ptx::ld_global_16(value, input + lane * 4);
  ptx::st_shared_16(smem + lane * 16, value);
  ptx::sync_warp();
  ptx::ld_shared_16(value, smem + (31 - lane) * 16);
  ptx::st_global_16(output + lane * 4, value);
}

FFPA_KERNEL(32, 1) void atom_add_kernel(const uint32_t* input, uint32_t* output) {
  uint32_t* counter = output + ptx::lane_id() / 2;  // two lanes share one counter
  ptx::st_global_4(counter, 0);
  ptx::sync_warp();
  ptx::atom_add_global(counter, ptx::ld_global_4(input + ptx::lane_id()));
  ptx::sync_warp();
  ptx::st_global_4(output + 16 + ptx::lane_id() / 2, ptx::atom_add_global(counter, 0));
}

// Eight lanes share a word, which begins in the middle of what may come.
template <class Reduce>
FFPA_DEVICE void reduce_words(const uint32_t* input, uint32_t* output, uint32_t begin, const Reduce& reduce) {
  uint32_t* word = output + ptx::lane_id() / 8;
  ptx::st_global_4(word, begin);
  ptx::sync_warp();
  reduce(word, ptx::ld_global_4(input + ptx::lane_id()));
}

FFPA_KERNEL(32, 1) void red_max_signed_kernel(const uint32_t* input, uint32_t* output) {
  reduce_words(input, output, 0x60000000, [](void* at, uint32_t value) { ptx::red_max_signed_global(at, value); });
}

FFPA_KERNEL(32, 1) void red_min_kernel(const uint32_t* input, uint32_t* output) {
  reduce_words(input, output, 0x20000000, [](void* at, uint32_t value) { ptx::red_min_global(at, value); });
}

inline std::vector<Case> memory_cases() {
  return {
      {"ld_global_1", 80, Input::kBits, 8, 32, 0, run_kernel<memory_1_kernel, 32, 0>},
      {"ld_global_2", 80, Input::kBits, 16, 16, 0, run_kernel<memory_2_kernel, 32, 64>},
      warp_case<memory_4_kernel, 128>("ld_global_4", Input::kBits, 1, 1),
      warp_case<memory_8_kernel, 256>("ld_global_8", Input::kBits, 2, 2),
      warp_case<memory_16_kernel, 512>("ld_global_16", Input::kBits, 4, 4),
      warp_case<prefetch_kernel, 0>("prefetch_global", Input::kBits, 1, 1),
      warp_case<atom_add_kernel, 0>("atom_add_global", Input::kBits, 1, 1),
      {"red_max_signed_global", 80, Input::kBits, 32, 4, 0, run_kernel<red_max_signed_kernel, 32, 0>},
      {"red_min_global", 80, Input::kBits, 32, 4, 0, run_kernel<red_min_kernel, 32, 0>},
  };
}

// This is cp.async: odd lanes have no source, and get zeros.
FFPA_KERNEL(32, 1) void cp_async_or_zero_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  const uint32_t mine = ptx::dynamic_smem() + lane * 16;
  for (int i = 0; i < 4; ++i) ptx::st_shared_4(mine + i * 4, 7);
  const bool exists = lane % 2 == 0;
  ptx::cp_async_16_or_zero(exists, mine, exists ? input + lane * 4 : nullptr);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  for (int i = 0; i < 4; ++i) ptx::st_global_4(output + lane * 4 + i, ptx::ld_shared_4(mine + i * 4));
}

// Four groups are in flight; group g is read after a wait that leaves 3 - g pending.
FFPA_KERNEL(32, 1) void cp_async_groups_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  const uint32_t mine = ptx::dynamic_smem() + lane * 16;
  for (int group = 0; group < 4; ++group) {
    ptx::cp_async_16_or_zero(true, mine + group * 512, input + group * 128 + lane * 4);
    ptx::cp_async_commit_group();
  }
  for (int group = 0; group < 4; ++group) {
    if (group == 0) ptx::cp_async_wait_group<3>();
    if (group == 1) ptx::cp_async_wait_group<2>();
    if (group == 2) ptx::cp_async_wait_group<1>();
    if (group == 3) ptx::cp_async_wait_group<0>();
    uint32_t value[4];
    ptx::ld_shared_16(value, mine + group * 512);
    ptx::st_global_16(output + group * 128 + lane * 4, value);
  }
}

inline std::vector<Case> async_copy_cases() {
  return {
      warp_case<cp_async_or_zero_kernel, 512>("cp_async_16_or_zero", Input::kBits, 4, 4),
      warp_case<cp_async_groups_kernel, 2048>("cp_async_wait_group", Input::kBits, 16, 16),
  };
}

}  // namespace ffpa::cases
