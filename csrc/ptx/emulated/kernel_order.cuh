// Emulated side of ptx/native/kernel_order.cuh: kernels run one after the other.
#pragma once

namespace ffpa::ptx {

inline void wait_for_earlier_kernels() {}
inline void start_later_kernels() {}

}  // namespace ffpa::ptx
