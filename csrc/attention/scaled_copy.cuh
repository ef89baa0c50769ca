// out[i] = scale * in[i]: the smallest kernel that takes the whole way from a spec to a launch. Tests and
// `python -m ffpa_attn.doctor` run it to tell a broken installation from a broken kernel.
#pragma once

#include <cstdint>

#include "attention/scaled_copy_params.h"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/launch_types.h"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace ffpa {

// Fields has Dtype (16 bits) and kUnroll (elements of one thread).
template <class Fields>
struct ScaledCopyConfig : Fields {
  using Params = ScaledCopyParams;

  static constexpr int kThreads = 256;
  static constexpr int kMinBlocksPerSm = 1;
  static constexpr int kBlockElements = kThreads * Fields::kUnroll;

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape;
    shape.grid.x = static_cast<uint32_t>(ceil_div(params.size, int64_t{kBlockElements}));
    shape.threads = kThreads;
    return shape;
  }
};

template <class Config>
FFPA_KERNEL(Config::kThreads, Config::kMinBlocksPerSm)
void scaled_copy(FFPA_GRID_CONSTANT const ScaledCopyParams params) {
  using Dtype = typename Config::Dtype;
  const Dtype* in = static_cast<const Dtype*>(params.in);
  Dtype* out = static_cast<Dtype*>(params.out);
  const int64_t first = int64_t{ptx::block_x()} * Config::kBlockElements + ptx::thread_x();
  FFPA_UNROLL
  for (int step = 0; step < Config::kUnroll; ++step) {
    const int64_t i = first + step * Config::kThreads;
    if (i < params.size) {
      const Dtype value{ptx::ld_global_2(in + i)};
      ptx::st_global_2(out + i, from_float<Dtype>(params.scale * to_float(value)).bits);
    }
  }
}

}  // namespace ffpa
