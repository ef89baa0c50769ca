// What an attention kernel is told about a call: the same for every kernel and every compiler.
#pragma once

#include <cstdint>

namespace ffpa {

// [batch, heads, rows, columns] of 16-bit elements; columns are adjacent, strides count elements.
struct TensorView {
  uint16_t* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
};

struct AttentionParams {
  TensorView q;    // [batch, heads_q, n_q, d_qk]
  TensorView k;    // [batch, heads_q / group, n_k, d_qk]
  TensorView v;    // [batch, heads_q / group, n_k, d_v]
  TensorView out;  // [batch, heads_q, n_q, d_v]
  float* lse;      // [batch, heads_q, n_q], natural log, or null

  int batch;
  int heads_q;
  int group;  // query heads that share a key/value head
  int n_q;
  int n_k;
  int d_qk;
  int d_v;

  // Row r sees the keys from r + shift - left to r + shift + right that exist. Unbounded sides come as n_q + n_k.
  int shift;
  int left;
  int right;

  float scale_log2;  // softmax scale · log2(e): scores are kept in base 2

  int stages;  // 1 … 4 buffers in the ring of K and V steps
  bool q_resident;  // Q stays in shared memory; otherwise its columns come along with those of K
};

}  // namespace ffpa
