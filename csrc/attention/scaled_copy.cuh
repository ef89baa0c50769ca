// out[i] = scale * in[i]: the smallest kernel that takes the whole way from a spec to a launch. Tests and
// `python -m ffpa_attn.doctor` run it to tell a broken installation from a broken kernel.
#pragma once

#include <cstdint>

#include "attention/launch_shape.h"
#include "attention/scaled_copy_params.h"

namespace ffpa {

// Fields: Dtype, kUnroll (elements of one thread).
template <class Fields>
struct ScaledCopyConfig : Fields {
  using Params = ScaledCopyParams;

  static constexpr int kThreads = 256;
  static constexpr int kMinBlocksPerSm = 1;
  static constexpr int kBlockElements = kThreads * Fields::kUnroll;

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape;
    shape.grid.x = static_cast<uint32_t>((params.size + kBlockElements - 1) / kBlockElements);
    shape.threads = kThreads;
    return shape;
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocksPerSm)
    scaled_copy(const __grid_constant__ ScaledCopyParams params) {
  using Dtype = typename Config::Dtype;
  const Dtype* in = static_cast<const Dtype*>(params.in);
  Dtype* out = static_cast<Dtype*>(params.out);
  const int64_t first = int64_t(blockIdx.x) * Config::kBlockElements + threadIdx.x;
#pragma unroll
  for (int step = 0; step < Config::kUnroll; ++step) {
    const int64_t i = first + step * Config::kThreads;
    if (i < params.size) out[i] = params.scale * in[i];
  }
}

}  // namespace ffpa
