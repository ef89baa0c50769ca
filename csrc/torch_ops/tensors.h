// Converts PyTorch's tensors to the forms that kernel parameters use.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <stdexcept>

#include "attention/attention_params.h"

namespace ffpa {

using torch::stable::Tensor;

inline HostTensor host_tensor(const Tensor& x) {
  return {x.data_ptr(), int(x.dim()), x.sizes().data(), x.strides().data()};
}

inline MaskView mask_view(const std::optional<Tensor>& mask) {
  if (!mask) return {};
  using torch::headeronly::ScalarType;
  const auto kind = [](ScalarType type) {
    switch (type) {
      case ScalarType::Bool:
        return MaskKind::kBool;
      case ScalarType::Half:
        return MaskKind::kHalf;
      case ScalarType::BFloat16:
        return MaskKind::kBFloat16;
      case ScalarType::Float:
        return MaskKind::kFloat;
      default:
        throw std::invalid_argument("ffpa_attn: a mask of another type than ops.py lets through");
    }
  };
  return host_tensor(*mask).mask(kind(mask->scalar_type()));
}

template <class Value>
Value* optional_data(const std::optional<Tensor>& x) {
  return x ? static_cast<Value*>(x->data_ptr()) : nullptr;
}

// Describes packed sequences: their offsets [B + 1], number and longest lengths; empty without offsets.
inline HostSequences sequences(const std::optional<Tensor>& offsets_q, const std::optional<Tensor>& offsets_k,
                               int64_t longest_q, int64_t longest_k) {
  if (!offsets_q) return {};
  return {optional_data<const int32_t>(offsets_q), optional_data<const int32_t>(offsets_k), offsets_q->size(0) - 1,
          longest_q, longest_k};
}

}  // namespace ffpa
