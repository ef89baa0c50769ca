// Launches the sm_90a misuse kernels by name.
#include "cases/copy_to_block.cuh"
#include "misuse_sm90_kernels.cuh"
#include "test_kernels.h"

namespace ffpa::testing {
namespace {

constexpr int kSmemBytes = 16 << 10;

template <cases::CaseKernel kKernel, int kThreads>
Kernel misuse(const char* name) {
  return {name, [](const Arguments& arguments) {
            return cases::run_kernel<kKernel, kThreads, kSmemBytes>(arguments.input<uint32_t>(0),
                                                                    arguments.output<uint32_t>(0));
          }};
}

template <cases::CopyBug kBug>
LaunchStatus run_copy(const Arguments& arguments) {
  return cases::run_copy_to_block<kBug>(arguments.input<uint32_t>(0), arguments.output<uint32_t>(0));
}

// Runs a kernel with a map of 4 rows of 64 elements, in boxes of 1 row.
template <void (*kKernel)(ptx::TensorMap)>
LaunchStatus run_with_map(const Arguments& arguments) {
  TensorMapSpec spec;
  spec.base = arguments.input<uint16_t>(0);
  spec.rank = 2;
  spec.size[0] = 64;
  spec.size[1] = 4;
  spec.stride_bytes[1] = 128;
  spec.box[0] = 64;
  spec.box[1] = 1;
  ptx::TensorMap map;
  const LaunchStatus encoded = ptx::encode_tensor_map(map, spec);
  if (!encoded.ok()) return encoded;
  LaunchShape shape;
  shape.smem_bytes = kSmemBytes;
  return launch(shape, nullptr, kKernel, map);
}

}  // namespace

std::vector<Kernel> misuse_sm90_kernels() {
  return {
      misuse<proxy_fence_kernel<true>, 128>("misuse_sm90/proxy_fence_present"),
      misuse<proxy_fence_kernel<false>, 128>("misuse_sm90/no_proxy_fence"),
      misuse<mbarrier_without_init_kernel, 32>("misuse_sm90/mbarrier_without_init"),
      misuse<mbarrier_too_many_arrivals_kernel, 32>("misuse_sm90/mbarrier_too_many_arrivals"),
      misuse<mbarrier_never_completes_kernel, 32>("misuse_sm90/mbarrier_never_completes"),
      misuse<misaligned_mbarrier_kernel, 32>("misuse_sm90/misaligned_mbarrier"),
      misuse<cluster_wait_without_arrive_kernel, 32>("misuse_sm90/cluster_wait_without_arrive"),
      misuse<remote_rank_kernel, 32>("misuse_sm90/remote_rank"),
      misuse<products_in_flight_at_exit_kernel, 128>("misuse_sm90/products_in_flight_at_exit"),
      misuse<descriptor_past_end_kernel, 128>("misuse_sm90/descriptor_past_end"),
      {"misuse_sm90/tma_in_flight_at_exit", run_with_map<tma_in_flight_at_exit_kernel>},
      {"misuse_sm90/store_under_tma", run_with_map<store_under_tma_kernel>},
      {"misuse_sm90/copy_without_proxy_fence", run_copy<cases::CopyBug::kNoProxyFence>},
      {"misuse_sm90/copy_read_early", run_copy<cases::CopyBug::kReadsEarly>},
      {"misuse_sm90/copy_over_unread", run_copy<cases::CopyBug::kOverwritesUnread>},
      {"misuse_sm90/copy_of_overwritten", run_copy<cases::CopyBug::kWritesSourceEarly>},
      {"misuse_sm90/copy_to_a_block_that_left", run_copy<cases::CopyBug::kLeavesEarly>},
  };
}

}  // namespace ffpa::testing
