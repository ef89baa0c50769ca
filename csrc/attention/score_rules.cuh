// From raw scores q · k to what softmax takes: logits in base 2,
//
//   logit = (cap(scale · q·k) + mask) · log2(e),  cap(x) = softcap · tanh(x / softcap), or x where there is no softcap;
//   -inf where the row does not see the key, or a bool mask says no.
//
// Kernels hold scores as C fragments, scores[m][n] for rows 16m and keys 8n of the thread's warp; `row` and `key` are
// where the first of them lie. Whatever a call or a tile does not need costs one uniform branch.
#pragma once

#include <cmath>

#include "attention/attention_params.h"
#include "attention/visible_keys.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/fragments.cuh"

namespace ffpa {

// tanh, relative error below 2^-22: a large softcap must leave small scores as they are. Below 0.6 the exponential form
// would cancel; there tanh(x) = x + x³ p(x²), with p the polynomial of least relative error.
FFPA_DEVICE float tanh_of(float x) {
  const float x2 = x * x;
  const float p = ((0.015612628f * x2 - 0.0522118f) * x2 + 0.13313116f) * x2 - 0.33332598f;
  const float small = x + x * x2 * p;
  const float large = 1 - 2 * ptx::rcp(1 + ptx::ex2(2 * kLog2e * std::fabs(x)));
  return std::fabs(x) < 0.6f ? small : std::copysign(large, x);
}

// function(score, row, key) for every score of the thread.
template <int kM, int kN, class Function>
FFPA_DEVICE void for_each_score(float (&scores)[kM][kN][4], int row, int key, int lane, Function function) {
  FFPA_UNROLL
  for (int m = 0; m < kM; ++m) {
    FFPA_UNROLL
    for (int n = 0; n < kN; ++n) {
      FFPA_UNROLL
      for (int e = 0; e < 4; ++e) {
        const tile::Coordinate at = tile::c_coordinate(lane, e);
        function(scores[m][n][e], row + m * 16 + at.row, key + n * 8 + at.column);
      }
    }
  }
}

// Adds a mask's element in base 2. What a float holds may be too much after the change of base; it stays finite then,
// as no score but -inf means that the key is hidden.
FFPA_DEVICE float plus_mask(float logit, float mask) {
  const float base2 = clamp(mask * kLog2e, -kLargestFloat, kLargestFloat);
  return logit + (std::fabs(mask) == kInfinity ? mask : base2);
}

template <class Element>
FFPA_DEVICE float masked_logit(float logit, const Element* mask_gmem);
template <>
FFPA_DEVICE float masked_logit(float logit, const bool* mask_gmem) {
  return ptx::ld_global_1(mask_gmem) ? logit : -kInfinity;
}
template <>
FFPA_DEVICE float masked_logit(float logit, const Half* mask_gmem) {
  float value, unused;
  ptx::unpack<Half>(ptx::ld_global_2(mask_gmem), value, unused);
  return plus_mask(logit, value);
}
template <>
FFPA_DEVICE float masked_logit(float logit, const BFloat16* mask_gmem) {
  return plus_mask(logit, to_float(BFloat16{ptx::ld_global_2(mask_gmem)}));
}
template <>
FFPA_DEVICE float masked_logit(float logit, const float* mask_gmem) {
  return plus_mask(logit, float_from_bits(ptx::ld_global_4(mask_gmem)));
}

template <class Element, int kM, int kN>
FFPA_DEVICE void mask_logits(float (&logits)[kM][kN][4], const AttentionParams& params, int batch, int head, int row,
                             int key, int lane) {
  const MaskView& mask = params.mask;
  const Element* of_head = static_cast<const Element*>(mask.data) + batch * mask.batch_stride + head * mask.head_stride;
  // One pointer for one row after the other: together, the offsets of all keys would take the registers that O needs.
  FFPA_UNROLL
  for (int m = 0; m < kM; ++m) {
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int r =
          min_of(row + m * 16 + tile::c_coordinate(lane, 2 * h).row, params.n_q - 1);  // past it nothing counts
      int k = key + tile::c_coordinate(lane, 0).column;
      const Element* at = of_head + r * mask.row_stride + k * mask.key_stride;
      FFPA_UNROLL
      for (int n = 0; n < kN; ++n) {
        if (k < params.n_k) logits[m][n][2 * h] = masked_logit(logits[m][n][2 * h], at);
        if (k + 1 < params.n_k) logits[m][n][2 * h + 1] = masked_logit(logits[m][n][2 * h + 1], at + mask.key_stride);
        at += 8 * mask.key_stride;
        k += 8;
      }
    }
  }
}

template <int kM, int kN>
FFPA_DEVICE void hide_unseen(float (&scores)[kM][kN][4], const AttentionParams& params, int row, int key, int lane) {
  for_each_score(scores, row, key, lane, [&](float& score, int r, int k) {
    if (!row_sees_key(params, r, k)) score = -kInfinity;
  });
}

// `all_seen`: every row sees every key of the tile.
template <int kM, int kN>
FFPA_DEVICE void scores_to_logits(float (&scores)[kM][kN][4], const AttentionParams& params, int batch, int head,
                                  bool all_seen, int row, int key, int lane) {
  if (params.softcap > 0) {
    for_each_score(scores, row, key, lane, [&](float& score, int, int) {
      score = params.softcap * tanh_of(score * params.score_factor) * kLog2e;
    });
  } else {
    for_each_score(scores, row, key, lane, [&](float& score, int, int) { score *= params.score_factor; });
  }
  switch (params.mask.kind) {
    case MaskKind::kNone:
      break;
    case MaskKind::kBool:
      mask_logits<bool>(scores, params, batch, head, row, key, lane);
      break;
    case MaskKind::kHalf:
      mask_logits<Half>(scores, params, batch, head, row, key, lane);
      break;
    case MaskKind::kBFloat16:
      mask_logits<BFloat16>(scores, params, batch, head, row, key, lane);
      break;
    case MaskKind::kFloat:
      mask_logits<float>(scores, params, batch, head, row, key, lane);
      break;
  }
  if (!all_seen) hide_unseen(scores, params, row, key, lane);
}

}  // namespace ffpa
