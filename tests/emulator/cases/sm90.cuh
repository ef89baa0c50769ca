// Cases for instructions that sm_90 has and sm_80 does not.
#pragma once

#include "cases/case.h"
#include "cases/matrix.cuh"

namespace ffpa::cases {

inline std::vector<Case> stmatrix_cases() {
  constexpr int kSmem = 32 * kRowPitchBytes;
  constexpr int kArch = 90;
  const auto store_case = [](const char* name, int tiles, LaunchStatus (*run)(const uint32_t*, uint32_t*)) {
    return Case{name, kArch, Input::kBits, 32 * tiles, tiles * 8 * 4, 0, run};
  };
  return {
      store_case("stmatrix_x1", 1, run_kernel<stmatrix_kernel<1, false>, 32, kSmem>),
      store_case("stmatrix_x1_trans", 1, run_kernel<stmatrix_kernel<1, true>, 32, kSmem>),
      store_case("stmatrix_x2", 2, run_kernel<stmatrix_kernel<2, false>, 32, kSmem>),
      store_case("stmatrix_x2_trans", 2, run_kernel<stmatrix_kernel<2, true>, 32, kSmem>),
      store_case("stmatrix_x4", 4, run_kernel<stmatrix_kernel<4, false>, 32, kSmem>),
      store_case("stmatrix_x4_trans", 4, run_kernel<stmatrix_kernel<4, true>, 32, kSmem>),
  };
}

}  // namespace ffpa::cases
