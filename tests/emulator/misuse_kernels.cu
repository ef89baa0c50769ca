// Launches the misuse kernels by name.
#include "copy_ring_kernel.cuh"
#include "misuse_kernels.cuh"
#include "test_kernels.h"

namespace ffpa::testing {
namespace {

constexpr int kSmemBytes = 4096;

template <cases::CaseKernel kKernel, int kThreads, int kBlocks = 1>
Kernel misuse(const char* name) {
  return {name, [](const Arguments& arguments) {
            return cases::run_kernel<kKernel, kThreads, kSmemBytes, kBlocks>(arguments.input<uint32_t>(0),
                                                                             arguments.output<uint32_t>(0));
          }};
}

// Takes integers: stride in words, and optionally grid, threads and shared memory of the launch.
template <void (*kKernel)(int)>
LaunchStatus run_strided(const Arguments& arguments) {
  LaunchShape shape;
  shape.smem_bytes = 32 << 10;
  if (arguments.integers.size() > 1) shape.grid.x = uint32_t(arguments.integers[1]);
  if (arguments.integers.size() > 2) shape.threads = int(arguments.integers[2]);
  if (arguments.integers.size() > 3) shape.smem_bytes = uint32_t(arguments.integers[3]);
  return launch(shape, nullptr, kKernel, int(arguments.integers.at(0)));
}

// Takes integers: steps, slots, bug.
template <int kThreads>
LaunchStatus run_ring(const Arguments& arguments) {
  return run_copy_ring<kThreads>(arguments.input<uint32_t>(0), arguments.output<uint32_t>(0),
                                 int(arguments.integers.at(0)), int(arguments.integers.at(1)),
                                 static_cast<RingBug>(arguments.integers.at(2)));
}

}  // namespace

std::vector<Kernel> misuse_kernels() {
  return {
      misuse<deadlock_kernel, 64>("misuse/deadlock"),
      misuse<barrier_count_kernel, 64>("misuse/barrier_count"),
      misuse<barrier_not_a_warp_multiple_kernel, 64>("misuse/barrier_not_a_warp_multiple"),
      misuse<exit_before_collective_kernel, 32>("misuse/exit_before_collective"),
      misuse<divergent_shuffle_kernel, 32>("misuse/divergent_shuffle"),
      misuse<copy_never_awaited_kernel, 32>("misuse/copy_never_awaited"),
      misuse<copy_never_committed_kernel, 32>("misuse/copy_never_committed"),
      misuse<tracked_copy_not_awaited_kernel, 32>("misuse/tracked_copy_not_awaited"),
      misuse<store_before_tracked_copy_kernel, 64>("misuse/store_before_tracked_copy"),
      misuse<wait_for_overwritten_copy_kernel, 64>("misuse/wait_for_overwritten_copy"),
      misuse<misaligned_shared_kernel, 32>("misuse/misaligned_shared"),
      misuse<misaligned_ldmatrix_kernel, 32>("misuse/misaligned_ldmatrix"),
      misuse<misaligned_global_kernel, 32>("misuse/misaligned_global"),
      misuse<shared_past_end_kernel, 32>("misuse/shared_past_end"),
      misuse<shared_without_base_kernel, 32>("misuse/shared_without_base"),
      misuse<global_past_end_kernel, 32>("misuse/global_past_end"),
      misuse<global_before_start_kernel, 32>("misuse/global_before_start"),
      misuse<store_to_read_only_kernel, 32>("misuse/store_to_read_only"),
      misuse<plain_pointer_kernel, 32>("misuse/plain_pointer"),
      misuse<endless_loop_kernel, 32>("misuse/endless_loop"),
      misuse<no_syncwarp_kernel, 32>("misuse/no_syncwarp"),
      misuse<no_syncthreads_kernel, 64>("misuse/no_syncthreads"),
      misuse<write_write_kernel, 64>("misuse/write_write"),
      misuse<blocks_write_the_same_kernel, 32, 2>("misuse/blocks_write_the_same"),
      misuse<block_reads_what_another_wrote_kernel, 32, 2>("misuse/block_reads_what_another_wrote"),
      misuse<read_uninitialised_kernel, 32>("misuse/read_uninitialised"),
      {"copy_ring/64", run_ring<64>},
      {"copy_ring/256", run_ring<256>},
      {"banks/store_4", run_strided<strided_store_kernel>},
      {"banks/store_16", run_strided<strided_store_16_kernel>},
      {"banks/ldmatrix_x4", run_strided<strided_ldmatrix_kernel>},
  };
}

}  // namespace ffpa::testing
