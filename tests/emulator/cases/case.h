// A test case: one kernel around one instruction, which turns an array of 32-bit words into another.
//
// The same cases run in the emulator, where Python compares the output with the scalar definition, and on a GPU, where
// tests/conform compares the two outputs bit for bit. A case is called "function" or "function/variant", after the
// function of csrc/ptx that it covers; other names are for things that are no such function.
#pragma once

#include <cstdint>
#include <vector>

#include "base/compiler.h"
#include "base/types.h"
#include "launch/launch.cuh"
#include "ptx/instructions.cuh"

namespace ffpa::cases {

enum class Input {
  kBits,            // any 32 bits
  kHalves,          // pairs of halves of 0.06 to 4 in magnitude; as bfloat16 they span 1e-12 to 500
  kBytes,           // 8-bit floats: as E4M3 of 0.03 to 240 in magnitude, as E5M2 of 5e-4 to 7168
  kFloats,          // -8 to 8, all 24 bits of the significand in use
  kPositiveFloats,  // 2^-20 to 2^20
};

struct Case {
  const char* name;
  int arch;  // first architecture that has the instruction
  Input input;
  int input_words;
  int output_words;
  double ulp_bound;  // largest error of a GPU's result in ulps; 0: bit for bit
  LaunchStatus (*run)(const uint32_t* input, uint32_t* output);
};

using CaseKernel = void (*)(const uint32_t* input, uint32_t* output);

template <CaseKernel kKernel, int kThreads, int kSmemBytes, int kGridX = 1, int kGridY = 1, int kGridZ = 1>
LaunchStatus run_kernel(const uint32_t* input, uint32_t* output) {
  LaunchShape shape;
  shape.grid = {kGridX, kGridY, kGridZ};
  shape.threads = kThreads;
  shape.smem_bytes = kSmemBytes;
  return launch(shape, nullptr, kKernel, input, output);
}

// Makes a case of a kernel of one warp that reads and writes some words per lane.
template <CaseKernel kKernel, int kSmemBytes = 0>
Case warp_case(const char* name, Input input, int input_words_per_lane, int output_words_per_lane, int arch = 80,
               double ulp_bound = 0) {
  return {name,
          arch,
          input,
          32 * input_words_per_lane,
          32 * output_words_per_lane,
          ulp_bound,
          run_kernel<kKernel, 32, kSmemBytes>};
}

// Makes a float with 24 random significant bits, -4 … 4, from 32 random bits: the same on both sides, without rounding.
FFPA_HOST_DEVICE float float_from_random(uint32_t bits) {
  constexpr float kScale = 1.0f / (1 << 21);
  return float(int(bits >> 8) - (1 << 23)) * kScale;
}

std::vector<Case> special_register_cases();
std::vector<Case> memory_cases();
std::vector<Case> flag_cases();
std::vector<Case> async_copy_cases();
std::vector<Case> mbarrier_cases();
std::vector<Case> matrix_cases();
std::vector<Case> warp_cases();
std::vector<Case> arithmetic_cases();
std::vector<Case> tile_cases();

// Returns all cases that run on any supported GPU; sm_90 instructions are in sm90.cuh.
inline std::vector<Case> sm80_cases() {
  std::vector<Case> all;
  for (auto group : {special_register_cases, memory_cases, flag_cases, async_copy_cases, mbarrier_cases, matrix_cases,
                     warp_cases, arithmetic_cases, tile_cases}) {
    const std::vector<Case> cases = group();
    all.insert(all.end(), cases.begin(), cases.end());
  }
  return all;
}

}  // namespace ffpa::cases
