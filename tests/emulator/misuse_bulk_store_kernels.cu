// Launches the misuse kernels of TMA stores by name.
#include "misuse_bulk_store_kernels.cuh"
#include "test_kernels.h"

namespace ffpa::testing {
namespace {

constexpr int kSmemBytes = 16 << 10;

// Runs a kernel with a map of boxes of kBoxRows × 64 elements, in 4 rows that start at word kFirstWord of output or
// input.
template <void (*kKernel)(ptx::TensorMap, uint32_t*), int kThreads, int kBlocks = 1, bool kOfInput = false,
          int kFirstWord = 0, int kBoxRows = 1>
LaunchStatus run_with_map(const Arguments& arguments) {
  TensorMapSpec spec;
  spec.base = (kOfInput ? arguments.input<uint32_t>(0) : arguments.output<uint32_t>(0)) + kFirstWord;
  spec.rank = 2;
  spec.size[0] = 64;
  spec.size[1] = 4;
  spec.stride_bytes[1] = kStoredRowBytes;
  spec.box[0] = 64;
  spec.box[1] = kBoxRows;
  ptx::TensorMap map;
  const LaunchStatus encoded = ptx::encode_tensor_map(map, spec);
  if (!encoded.ok()) return encoded;
  LaunchShape shape;
  shape.grid.x = kBlocks;
  shape.threads = kThreads;
  shape.smem_bytes = kSmemBytes;
  shape.cooperative = kBlocks > 1;
  return launch(shape, nullptr, kKernel, map, arguments.output<uint32_t>(0));
}

template <Between kBetween>
constexpr auto run_read_back = run_with_map<read_back_kernel<kBetween>, 64>;

}  // namespace

std::vector<Kernel> misuse_bulk_store_kernels() {
  constexpr int kOutputWords = 1024;
  constexpr int kThreeRows = 3 * kStoredRowBytes / 4;
  return {
      {"misuse_bulk/never_awaited", run_with_map<store_never_awaited_kernel, 32>},
      {"misuse_bulk/before_the_tensor", run_with_map<store_before_the_tensor_kernel, 32>},
      {"misuse_bulk/to_an_odd_column", run_with_map<store_to_an_odd_column_kernel, 32>},
      {"misuse_bulk/never_committed", run_with_map<store_never_committed_kernel, 32>},
      {"misuse_bulk/awaited_by_another", run_with_map<store_awaited_by_another_kernel, 32>},
      {"misuse_bulk/no_proxy_fence", run_with_map<store_without_proxy_fence_kernel, 32>},
      {"misuse_bulk/wrong_fence", run_with_map<store_with_the_wrong_fence_kernel, 32>},
      {"misuse_bulk/no_barrier_before", run_with_map<store_without_barrier_kernel, 32>},
      {"misuse_bulk/source_overwritten", run_with_map<source_overwritten_kernel<false>, 32>},
      {"misuse_bulk/source_overwritten_by_lane", run_with_map<source_overwritten_kernel<true>, 32>},
      {"misuse_bulk/source_overwritten_by_warp", run_with_map<source_overwritten_by_a_warp_kernel, 64>},
      {"misuse_bulk/younger_source_overwritten", run_with_map<younger_source_overwritten_kernel, 32>},
      {"misuse_bulk/source_overwritten_by_load", run_with_map<source_overwritten_by_a_load_kernel, 32>},
      {"misuse_bulk/load_before_complete", run_with_map<read_before_complete_kernel<true>, 32>},
      {"misuse_bulk/ordinary_load_before_complete", run_with_map<read_before_complete_kernel<false>, 32>},
      {"misuse_bulk/ordinary_store_before_complete", run_with_map<ordinary_store_before_complete_kernel, 32>},
      {"misuse_bulk/two_stores_to_one_row", run_with_map<two_stores_to_one_row_kernel, 32>},
      {"misuse_bulk/no_fence", run_read_back<Between::kNoFence>},
      {"misuse_bulk/fence_before_wait", run_read_back<Between::kFenceBeforeWait>},
      {"misuse_bulk/late_fence", run_read_back<Between::kLateFence>},
      {"misuse_bulk/shared_fence", run_read_back<Between::kSharedFence>},
      {"misuse_bulk/no_barrier", run_read_back<Between::kNoBarrier>},
      {"misuse_bulk/storer_fences", run_read_back<Between::kStorerFences>},
      {"misuse_bulk/loader_fences", run_read_back<Between::kLoaderFences>},
      {"misuse_bulk/same_lane", run_with_map<read_back_in_warp_kernel<0>, 32>},
      {"misuse_bulk/no_syncwarp", run_with_map<read_back_in_warp_kernel<1>, 32>},
      {"misuse_bulk/misaligned_source", run_with_map<misaligned_source_kernel, 32>},
      {"misuse_bulk/source_past_end", run_with_map<source_past_end_kernel, 32>},
      {"misuse_bulk/wrong_rank", run_with_map<wrong_rank_kernel, 32>},
      {"misuse_bulk/to_read_only", run_with_map<store_to_the_last_row_kernel, 32, 1, true>},
      {"misuse_bulk/past_end", run_with_map<store_to_the_last_row_kernel, 32, 1, false, kOutputWords - kThreeRows>},
      {"misuse_bulk/told", run_with_map<tell_another_block_kernel<Told::kAll>, 32, 2>},
      {"misuse_bulk/told_to_ordinary_loads",
       run_with_map<tell_another_block_kernel<Told::kNoFenceToOrdinaryLoads>, 32, 2, false, 0, 2>},
      {"misuse_bulk/told_without_fence", run_with_map<tell_another_block_kernel<Told::kNoFence>, 32, 2>},
      {"misuse_bulk/told_before_complete", run_with_map<tell_another_block_kernel<Told::kOnlyRead>, 32, 2>},
      {"misuse_bulk/told_before_it_is_loaded",
       run_with_map<tell_another_block_kernel<Told::kLoadsBeforeRelease>, 32, 2>},
      {"misuse_bulk/added", run_with_map<add_row_kernel<AddBug::kNone>, 32, 2>},
      {"misuse_bulk/added_over_the_source", run_with_map<add_row_kernel<AddBug::kOverwritesSource>, 32, 2>},
      {"misuse_bulk/added_twice", run_with_map<add_row_kernel<AddBug::kAddsTwice>, 32, 2>},
      {"misuse_bulk/added_in_any_order", run_with_map<add_row_kernel<AddBug::kUnordered>, 32, 2>},
      {"misuse_bulk/added_without_fence", run_with_map<add_row_kernel<AddBug::kNoFence>, 32, 2>},
      {"misuse_bulk/added_odd_bytes", run_with_map<add_row_kernel<AddBug::kOddBytes>, 32, 2>},
      {"misuse_bulk/blocks_store_the_same", run_with_map<blocks_meet_in_a_row_kernel<false>, 32, 2>},
      {"misuse_bulk/block_loads_what_another_stored", run_with_map<blocks_meet_in_a_row_kernel<true>, 32, 2>},
  };
}

}  // namespace ffpa::testing
