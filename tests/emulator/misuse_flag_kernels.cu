// Launches the misuse kernels of flags by name.
#include "misuse_flag_kernels.cuh"
#include "test_kernels.h"

namespace ffpa::testing {
namespace {

template <cases::CaseKernel kKernel, int kThreads, int kBlocks = 2, bool kCooperative = true>
LaunchStatus run(const Arguments& arguments) {
  return cases::run_flags<kKernel, kCooperative, kBlocks, kThreads>(arguments.input<uint32_t>(0),
                                                                    arguments.output<uint32_t>(0));
}

template <FlagBug kBug>
constexpr auto run_pass_on = run<pass_on_kernel<kBug>, 64>;

}  // namespace

std::vector<Kernel> misuse_flag_kernels() {
  constexpr int kBlocks = 8;
  return {
      {"misuse_flags/wait_for_each_other", run<wait_for_each_other_kernel, 32>},
      {"misuse_flags/wait_for_too_much", run<wait_for_too_much_kernel, 32>},
      {"misuse_flags/wait_for_the_block_before", run<wait_for_the_block_before_kernel, 32, kBlocks, false>},
      {"misuse_flags/wait_for_blocks_that_have_not_begun",
       run<cases::meeting_kernel<kBlocks>, cases::kFlagThreads, kBlocks, false>},
      {"misuse_flags/more_blocks_than_a_gpu_holds", run<wait_for_the_block_before_kernel, 32, 132 * 32 + 1>},
      {"misuse_flags/overwrites_after_reader_0", run<overwrite_after_one_reader_kernel<0>, 32, 3>},
      {"misuse_flags/overwrites_after_reader_1", run<overwrite_after_one_reader_kernel<1>, 32, 3>},
      {"misuse_flags/overwrites_after_its_reader", run<overwrite_after_one_reader_kernel<0>, 32, 2>},
      {"misuse_flags/flag_of_each_warp", run<flag_of_each_warp_kernel<2>, 64>},
      {"misuse_flags/none", run_pass_on<FlagBug::kNone>},
      {"misuse_flags/set_before_the_data", run_pass_on<FlagBug::kSetBeforeTheData>},
      {"misuse_flags/set_without_barrier", run_pass_on<FlagBug::kSetWithoutBarrier>},
      {"misuse_flags/no_barrier_after_wait", run_pass_on<FlagBug::kNoBarrierAfterWait>},
      {"misuse_flags/no_wait", run_pass_on<FlagBug::kNoWait>},
      {"misuse_flags/reads_flag_as_data", run_pass_on<FlagBug::kReadsFlagAsData>},
      {"misuse_flags/no_fence", run<cases::last_block_kernel<kBlocks, true, false>, cases::kFlagThreads, kBlocks>},
      {"misuse_flags/no_fence_before", run_pass_on<FlagBug::kNoFenceBefore>},
      {"misuse_flags/reads_after_release", run_pass_on<FlagBug::kReadsAfterRelease>},
      {"misuse_flags/set_by_ordinary_store", run_pass_on<FlagBug::kSetByOrdinaryStore>},
  };
}

}  // namespace ffpa::testing
