// Launches the instances of the split-D test kernel by name.
#include "split_d_kernel.cuh"
#include "test_kernels.h"

namespace ffpa::testing {
namespace {

// Takes inputs: q, k, v; output: o; integers: heads, nq, nk, bug; numbers: scale.
template <class Element, int kHeadDim>
LaunchStatus run_split_d(const Arguments& arguments) {
  SplitDParams params;
  params.q = arguments.input<uint16_t>(0);
  params.k = arguments.input<uint16_t>(1);
  params.v = arguments.input<uint16_t>(2);
  params.o = arguments.output<uint16_t>(0);
  params.nq = int(arguments.integers.at(1));
  params.nk = int(arguments.integers.at(2));
  params.bug = static_cast<Bug>(arguments.integers.at(3));
  params.scale_log2 = float(arguments.numbers.at(0)) * kLog2e;
  LaunchShape shape;
  shape.grid = {uint32_t(ceil_div(params.nq, kTileRows)), uint32_t(arguments.integers.at(0)), 1};
  shape.threads = kSplitDThreads;
  shape.smem_bytes = kSplitDSmemBytes;
  return launch(shape, nullptr, split_d_kernel<Element, kHeadDim>, params);
}

}  // namespace

std::vector<Kernel> split_d_kernels() {
  return {
      {"split_d/f16_64", run_split_d<Half, 64>},
      {"split_d/bf16_64", run_split_d<BFloat16, 64>},
      {"split_d/f16_320", run_split_d<Half, 320>},
  };
}

}  // namespace ffpa::testing
