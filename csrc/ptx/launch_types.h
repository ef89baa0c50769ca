// The shape that a launch needs and the status that it returns, the same for both compilers.
#pragma once

#include <cstdint>

namespace ffpa {

struct GridDim {
  uint32_t x = 1, y = 1, z = 1;
};

struct LaunchShape {
  GridDim grid;                 // blocks in each dimension
  int threads = 32;             // threads per block, a multiple of 32
  uint32_t smem_bytes = 0;      // bytes of dynamic shared memory of a block
  GridDim cluster;              // blocks in each dimension; every side divides the grid's
  uint32_t* counter = nullptr;  // counter in global memory, or null; 0 when the kernel starts
  bool starts_early =
      false;  // the kernel itself waits for those before it, before it ends (ptx::wait_for_earlier_kernels)
  bool cooperative = false;  // all blocks run at once, so that each may wait for any other; a larger grid fails
};

// Returns the shape of a kernel whose blocks take items until none are left: as many blocks, or clusters of blocks, as
// there are items, and no more than the GPU runs at a time, but at least one. The counter is for further items.
inline LaunchShape persistent_shape(int items, int resident_blocks, int threads, uint32_t smem_bytes,
                                    uint32_t* counter = nullptr, int cluster_blocks = 1) {
  const int most = resident_blocks > cluster_blocks ? resident_blocks / cluster_blocks : 1;
  const uint32_t clusters = uint32_t(items < most ? items : most), of_cluster = uint32_t(cluster_blocks);
  return {{clusters * of_cluster}, threads, smem_bytes, {of_cluster}, items > most ? counter : nullptr};
}

struct LaunchStatus {
  int code = 0;              // 0, a cudaError_t, 1 in emulation, or -1 where the driver is too old
  const char* message = "";  // valid until this thread's next launch
  bool ok() const { return code == 0; }
};

template <int kCount>
LaunchStatus first_failure(const LaunchStatus (&statuses)[kCount]) {
  for (const LaunchStatus& status : statuses) {
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace ffpa
