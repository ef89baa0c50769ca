// The sm_90a split-D test kernel's instances by name.
#include "split_d_sm90_launch.cuh"

namespace ffpa::testing {

std::vector<Kernel> split_d_sm90_kernels() {
  return {
      {"split_d_sm90/64_2_1", run_split_d_sm90<64, 2, 1>},   {"split_d_sm90/128_3_1", run_split_d_sm90<128, 3, 1>},
      {"split_d_sm90/512_2_1", run_split_d_sm90<512, 2, 1>}, {"split_d_sm90/128_2_2", run_split_d_sm90<128, 2, 2>},
      {"split_d_sm90/128_3_4", run_split_d_sm90<128, 3, 4>},
  };
}

}  // namespace ffpa::testing
