// Turns raw products q · k into what softmax takes:
//
//   score = cap(scale · q·k) + mask,  cap(x) = softcap · tanh(x / softcap), or x where there is no softcap;
//   -inf where the row does not see the key, or a bool mask says no;
//
// Each step is rounded as softmax of float32 scores rounds it. A Block says which batch entry and head the scores
// belong to, how many rows and keys it has, and which of them meet: it is a RowTile, or a tile with the same names.
//
// Kernels hold scores as C fragments, scores[m][n] for rows 16m and keys 8n of the thread's warp (or those keys that
// Fragments says); `row` and `key` are where the first of them lie, rows counted as place_in() wants. Whatever a call
// or a tile does not need costs one uniform branch.
#pragma once

#include <cmath>
#include <type_traits>

#include "attention/mask_pairs.cuh"
#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "tile/fragments.cuh"

namespace ffpa {

// What rules may take. Calls on pages have no masks. With few registers, a mask's elements come one by one, and there
// is one form of tanh.
enum class Rules { kWithoutMasks, kInFewRegisters, kFast };
template <bool kPaged>
inline constexpr Rules kRulesOf = kPaged ? Rules::kWithoutMasks : Rules::kFast;

// Returns tanh(x) with a relative error below 2^-22: a large softcap must leave small scores as they are. Below
// kMostSmall the exponential form would cancel; there tanh(x) = x + x³ p(x²), with p the polynomial of least relative
// error.
inline constexpr float kMostSmall = 0.6f;
FFPA_DEVICE bool is_small(float x) { return std::fabs(x) < kMostSmall; }
FFPA_DEVICE float small_tanh(float x) {
  const float x2 = x * x;
  const float p = ((0.015612628f * x2 - 0.0522118f) * x2 + 0.13313116f) * x2 - 0.33332598f;
  return x + x * x2 * p;
}
// Returns (1 - tanh|x|) / 2.
FFPA_DEVICE float rest_of_tanh(float x) { return ptx::rcp(1 + ptx::ex2(2 * kLog2e * std::fabs(x))); }
FFPA_DEVICE float tanh_of(float x) { return is_small(x) ? small_tanh(x) : std::copysign(1 - 2 * rest_of_tanh(x), x); }

// tanh(x) and its slope, 1 - tanh(x)², whose relative error stays that small where tanh is almost 1.
struct TanhAndSlope {
  float tanh, slope;

  FFPA_DEVICE static TanhAndSlope of_small(float x) {
    const float tanh = small_tanh(x);
    return {tanh, 1 - tanh * tanh};
  }
  FFPA_DEVICE static TanhAndSlope of(float x, float rest) {
    const TanhAndSlope small = of_small(x), large = {std::copysign(1 - 2 * rest, x), 4 * rest * (1 - rest)};
    return is_small(x) ? small : large;
  }
};

// Says whether none of a warp's numbers, products · factor, is large. For scores / softcap that is almost always so, as
// softcaps are far beyond most scores; then none needs the exponential form, whose two special functions take longer
// than all else, and results have the same bits. NaN counts as either. All lanes get the same answer.
template <int kM, int kN>
FFPA_DEVICE bool are_small(const float (&products)[kM][kN][4], float factor = 1) {
  float most = 0;
  FFPA_UNROLL
  for (int i = 0; i < kM * kN * 4; ++i) most = larger_of(most, std::fabs(products[i / (kN * 4)][i / 4 % kN][i % 4]));
  return ptx::vote_all(is_small(most * factor));
}

// Calls function(score) for every score of the thread.
template <int kM, int kN, class Function>
FFPA_DEVICE void for_each_score(float (&scores)[kM][kN][4], const Function& function) {
  FFPA_UNROLL
  for (int i = 0; i < kM * kN * 4; ++i) function(scores[i / (kN * 4)][i / 4 % kN][i % 4]);
}

// Adds a mask to a score; -inf hides the pair whatever its score is. With `kApart` the sum stays in its own branch, as
// the product in it is volatile: many sums computed ahead would not fit the registers that accumulators leave.
template <bool kApart>
FFPA_DEVICE float add_mask(float score, float mask) {
  if (mask == -kInfinity) return mask;
  return (kApart ? ptx::mul_rn(score, 1.0f) : score) + mask;
}

// Adds the mask, if there is one; `ahead` may have what it needs of it for this step of a tile.
template <class Fragments, Rules kRules, bool kApart, int kM, int kN, class Block, class Ahead = NoMaskAhead>
FFPA_DEVICE void mask_scores(float (&scores)[kM][kN][4], const AttentionParams& params, const Block& block, int row,
                             int key, int lane, const Ahead& ahead = {}, int step = 0) {
  const MaskView& mask = params.mask;
  if constexpr (kRules == Rules::kWithoutMasks) return;
  if (mask.kind == MaskKind::kNone || ahead.add_to(scores, step)) return;
  if constexpr (kRules == Rules::kFast && std::is_same_v<Ahead, NoMaskAhead>) {
    if (has_mask_pairs(mask) && key % 2 == 0 && key + kN * tile::kMmaN <= block.n_k()) {
      add_mask_pairs<Fragments>(scores, mask, block, row, key, lane);
      return;
    }
  }
  const uint8_t* of_entry = mask.data + block.batch() * mask.batch_stride;
  const int n_q = block.n_q(), n_k = block.n_k();
  // The loops go row by row, with the mask kinds inside: more elements at once would take the registers that O needs.
  FFPA_UNROLL
  for (int m = 0; m < kM; ++m) {
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      const RowPlace at = place_in(block, row + m * 16 + tile::c_coordinate(lane, 2 * h).row);
      const int r = min_of(at.row, n_q - 1);  // rows past it do not count
      const uint8_t* row_gmem = of_entry + at.head * mask.head_stride + r * mask.row_stride;
      const uint8_t* last = row_gmem + (n_k - 1) * mask.key_stride;  // keys past this do not count
      const uint8_t* gmem = row_gmem + (key + Fragments::first_column(lane)) * mask.key_stride;
      const auto apply = [&](auto masked) {
        FFPA_UNROLL
        for (int n = 0; n < kN; ++n) {
          FFPA_UNROLL
          for (int e = 0; e < 2; ++e) {
            float& score = scores[m][n][2 * h + e];
            score = masked(score, min_of(gmem + e * mask.key_stride, last));
          }
          gmem += (Fragments::column_of(n + 1) - Fragments::column_of(n)) * mask.key_stride;
        }
      };
      if (mask.kind == MaskKind::kBool) {
        apply([](float score, const uint8_t* at) { return ptx::ld_global_1(at) ? score : -kInfinity; });
      } else if (mask.kind == MaskKind::kFloat) {
        apply([](float score, const uint8_t* at) {
          return add_mask<kApart>(score, float_from_bits(ptx::ld_global_4(at)));
        });
      } else {
        const bool half = mask.kind == MaskKind::kHalf;
        apply([&](float score, const uint8_t* at) {
          const uint32_t bits = ptx::ld_global_2(at);
          float as_half, unused;
          ptx::unpack<Half>(bits, as_half, unused);
          return add_mask<kApart>(score, half ? as_half : float_from_bits(bits << 16));
        });
      }
    }
  }
}

template <class Fragments = tile::AdjacentFragments, int kM, int kN, class Block>
FFPA_DEVICE void hide_unseen(float (&scores)[kM][kN][4], const Block& block, int row, int key, int lane) {
  const int first_of_lane = key + Fragments::first_column(lane);
  FFPA_UNROLL
  for (int m = 0; m < kM; ++m) {
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int r = place_in(block, row + m * 16 + tile::c_coordinate(lane, 2 * h).row).row;
      const int first = max_of(r + block.nearest(), 0) - first_of_lane;  // the row sees the columns from here to `last`
      const int last = min_of(r + block.farthest(), block.n_k() - 1) - first_of_lane;
      FFPA_UNROLL
      for (int i = 0; i < kN * 2; ++i) {
        const int column = Fragments::column_of(i / 2) + i % 2;
        if (column < first || column > last) scores[m][i / 2][2 * h + i % 2] = -kInfinity;
      }
    }
  }
}

// Says whether products need no more than a positive factor to be scores, hidden ones aside, whatever the tile.
FFPA_DEVICE bool are_raw(const AttentionParams& params) {
  return !(params.softcap > 0) && params.mask.kind <= MaskKind::kBool && params.score_factor > 0;
}
// Says whether the products of one tile need no more than that, and none of them is hidden; `all_seen` says that all
// rows see its keys.
FFPA_DEVICE bool are_plain(const AttentionParams& params, bool all_seen) {
  return are_raw(params) && params.mask.kind == MaskKind::kNone && all_seen;
}

// Turns products into scores before masks. `scale` turns the given products into those of Q and K.
template <Rules kRules, int kM, int kN>
FFPA_DEVICE void scale_and_cap(float (&scores)[kM][kN][4], const AttentionParams& params, float scale = 1) {
  if (params.softcap > 0) {
    const float factor = params.score_factor * scale;
    if (kRules != Rules::kInFewRegisters && are_small(scores, factor)) {
      for_each_score(scores, [&](float& x) { x = ptx::mul_rn(params.softcap, small_tanh(ptx::mul_rn(x, factor))); });
    } else {
      for_each_score(scores, [&](float& x) { x = ptx::mul_rn(params.softcap, tanh_of(ptx::mul_rn(x, factor))); });
    }
  } else {
    for_each_score(scores, [&](float& score) { score = ptx::mul_rn(score, params.scale * scale); });
  }
}

// Turns products into scores. With `all_seen`, every row sees every key of the tile.
template <int kM, int kN, class Block>
FFPA_DEVICE void products_to_scores(float (&scores)[kM][kN][4], const AttentionParams& params, const Block& block,
                                    bool all_seen, int row, int key, int lane) {
  scale_and_cap<Rules::kInFewRegisters>(scores, params);
  mask_scores<tile::AdjacentFragments, Rules::kInFewRegisters, false>(scores, params, block, row, key, lane);
  if (!all_seen) hide_unseen(scores, block, row, key, lane);
}

}  // namespace ffpa
