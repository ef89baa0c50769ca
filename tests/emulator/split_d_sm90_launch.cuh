// Launches the sm_90a split-D test kernel.
#pragma once

#include "split_d_sm90_kernel.cuh"
#include "test_kernels.h"

namespace ffpa::testing {

inline ptx::TensorMap tensor_map(const uint16_t* base, int head_dim, int rows, int heads, int box_rows) {
  TensorMapSpec spec;
  spec.base = base;
  spec.rank = 4;
  spec.swizzle = Swizzle::k128Bytes;
  spec.size[0] = head_dim;
  spec.size[1] = rows;
  spec.size[2] = heads;
  spec.size[3] = 1;
  spec.stride_bytes[1] = uint64_t(head_dim) * 2;
  spec.stride_bytes[2] = uint64_t(rows) * head_dim * 2;
  spec.stride_bytes[3] = heads * spec.stride_bytes[2];
  spec.box[0] = kSm90SliceColumns;
  spec.box[1] = box_rows;
  spec.box[2] = 1;
  spec.box[3] = 1;
  ptx::TensorMap map;
  ptx::encode_tensor_map(map, spec);
  return map;
}

// Takes inputs: q, k, v; output: o; integers: heads, nq, nk; numbers: scale.
template <int kHeadDim, int kStages, int kCluster, Sm90Bug kBug = Sm90Bug::kNone>
LaunchStatus run_split_d_sm90(const Arguments& arguments) {
  const int heads = int(arguments.integers.at(0));
  const int nq = int(arguments.integers.at(1));
  const int nk = int(arguments.integers.at(2));
  const SplitDSm90Params params{arguments.output<uint16_t>(0), nq, nk, float(arguments.numbers.at(0)) * kLog2e};
  LaunchShape shape;
  shape.grid = {uint32_t(round_up(ceil_div(nq, 64), kCluster)), uint32_t(heads), 1};
  shape.cluster = {kCluster, 1, 1};
  shape.threads = kSm90Threads;
  shape.smem_bytes = kSplitDSm90SmemBytes<kStages>;
  return launch(shape, nullptr, split_d_sm90_kernel<kHeadDim, kStages, kCluster, kBug>,
                tensor_map(arguments.input<uint16_t>(0), kHeadDim, nq, heads, 64),
                tensor_map(arguments.input<uint16_t>(1), kHeadDim, nk, heads, 64 / kCluster),
                tensor_map(arguments.input<uint16_t>(2), kHeadDim, nk, heads, 64 / kCluster), params);
}

}  // namespace ffpa::testing
