// Launches kernels on tensors, with the device guard, PyTorch's current stream, and errors that say what was launched.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <string>

namespace ffpa {

// Enqueues kernel `name` with `params` on the device of `on`, on PyTorch's current stream there. Throws for an unknown
// name and for a launch that fails.
void launch_on(const torch::stable::Tensor& on, const std::string& name, const void* params, std::size_t params_bytes);

template <class Params>
void launch_on(const torch::stable::Tensor& on, const std::string& name, const Params& params) {
  launch_on(on, name, &params, sizeof(Params));
}

}  // namespace ffpa
