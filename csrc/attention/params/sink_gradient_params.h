// The parameters of the gradient of sinks, which is summed over all rows of a head, and of δ, which that needs of each
// row. Packed sequences are one batch entry with the rows of all of them.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "base/compiler.h"
#include "base/math.h"

namespace ffpa {

inline constexpr int kSinkRows = 64;  // rows of a block

struct SinkGradientParams {
  TensorView out;         // [batch, heads, rows, columns]
  TensorView grad_out;    // the same shape
  const float* lse;       // [batch, heads, rows], with the sinks in it
  const float* grad_lse;  // the same shape, or null
  const float* sinks;     // [heads]
  float* partial;         // [heads][batch][blocks of kSinkRows rows]: sums whose sum is the gradient
  float* delta;           // δ, the shape of lse, or null

  int batch, heads, rows, columns;

  FFPA_HOST_DEVICE int blocks_of_head() const { return batch * ceil_div(rows, kSinkRows); }
};

}  // namespace ffpa
