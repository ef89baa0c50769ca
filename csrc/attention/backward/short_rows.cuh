// ShortRows are the rows that the lanes of a warp have in mma_short.cuh: 16 of a row tile, two in a lane, for a part of
// the keys; their LSE, and δ.
//
// Where all keys of a row are here, δ = dO·O is the mean of dP, weighed by P, and nobody has to read O. The LSE of
// other rows covers more keys than these (as in a ring), or is too large for P to sum to 1, and their δ is dO·O.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/backward/pairs.cuh"
#include "attention/backward/row_dot.cuh"
#include "attention/backward/short_head.cuh"
#include "attention/params/backward_params.h"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "tile/fragments.cuh"

namespace ffpa {

template <class Config>
class ShortRows : public ShortHead<Config> {
  using Head = ShortHead<Config>;
  using Element = typename Config::Dtype;
  static constexpr int kTile = Config::kTile, kAcross = Config::kAcross;
  static constexpr float kMostMissing = 0x1p-14f;  // P of other keys, in a row that counts as whole

 public:
  using typename Head::Rows;
  using SumsOfRow = float[3];  // of P in float32; as P is stored, of P and of P ∘ dP

  struct RowNumbers {
    float lse[2];    // natural; +inf where the row does not exist or sees no key
    bool all_count;  // whether no pair is hidden, and no number may be NaN
    float sum[2];    // of P, over the warp's keys
  };

  FFPA_DEVICE explicit ShortRows(const BackwardParams& params)
      : Head(params),
        thread_(ptx::thread_x()),
        lane_(ptx::lane_id()),
        warp_row_(thread_ / 32 / kAcross * Config::kWarpRows),
        part_(thread_ / 32 % kAcross) {}

  // Return the row of the row tile that a lane has in half `h` of a C fragment, and the place of its LSE, or of that of
  // the last row.
  FFPA_DEVICE int row_of_lane(int h) const { return warp_row_ + tile::c_coordinate(lane_, 2 * h).row; }
  FFPA_DEVICE int64_t lse_of_lane(const Rows& rows, int h) const {
    return lse_row(rows, min_of(row_of_lane(h), n_q() - 1 - rows.first));
  }

  FFPA_DEVICE RowNumbers numbers_of(const Rows& rows) const {
    RowNumbers numbers;
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      const float lse = load_float(attention_.lse + lse_of_lane(rows, h));
      numbers.lse[h] = rows.first + row_of_lane(h) >= n_q() || lse == -kInfinity ? kInfinity : lse;
    }
    return numbers;
  }

  // Computes δ less dLSE, from the sums over a lane's keys in each half of the rows.
  FFPA_DEVICE void finish_deltas(float (&delta)[2], SumsOfRow (&of_rows)[2], const Rows& rows) const {
    FFPA_UNROLL
    for (SumsOfRow& of_row : of_rows) {
      of_row[1] = tile::sum_of_lanes(of_row[1]);
      of_row[2] = tile::sum_of_lanes(of_row[2]);
    }
    if (kAcross > 1) add_those_of_other_keys(of_rows);
    if (part_ == 0) {
      const auto lacks_keys = [&](int h) {
        return !(std::fabs(of_rows[h][0] - 1) <= kMostMissing) && of_rows[h][1] != 0;
      };
      const bool any_lacks_keys = ptx::vote_any(lacks_keys(0) || lacks_keys(1));
      FFPA_UNROLL
      for (int h = 0; h < 2; ++h) {
        delta[h] = of_rows[h][1] != 0 ? of_rows[h][2] / of_rows[h][1] : 0.0f;
        const float from_out = any_lacks_keys ? grad_out_dot_out(rows, h) : 0.0f;
        if (lacks_keys(h)) delta[h] = from_out;
        if (params_.grad_lse != nullptr) delta[h] -= load_float(params_.grad_lse + lse_of_lane(rows, h));
      }
    }
    if (kAcross > 1) share_deltas(delta);
  }

 protected:
  using Head::attention_, Head::params_, Head::batch_, Head::q_, Head::n_q, Head::load_float, Head::lse_row;

  int thread_, lane_;
  int warp_row_;  // first row of the warp in a row tile, and its first key for dK and dV
  int part_;      // which keys of a row tile the warp has, and which columns of a gradient

 private:
  // The first of two warps with the same rows, and different keys, gets the sums of both, and then tells the other δ.
  // All warps of the block call these together.
  FFPA_DEVICE void add_those_of_other_keys(SumsOfRow (&of_rows)[2]) const {
    for_shared_numbers(part_ > 0, of_rows, [](uint32_t smem, float number) {
      ptx::st_shared_4(smem, float_bits(number));
      return number;
    });
    ptx::sync_block();
    for_shared_numbers(part_ == 0, of_rows,
                       [](uint32_t smem, float number) { return number + float_from_bits(ptx::ld_shared_4(smem)); });
  }
  FFPA_DEVICE void share_deltas(float (&delta)[2]) const {
    float numbers[2][1] = {{delta[0]}, {delta[1]}};
    ptx::sync_warp();  // the four lanes of a row have read the sums
    for_shared_numbers(part_ == 0, numbers, [](uint32_t smem, float number) {
      ptx::st_shared_4(smem, float_bits(number));
      return number;
    });
    ptx::sync_block();
    for_shared_numbers(part_ > 0, numbers,
                       [](uint32_t smem, float) { return float_from_bits(ptx::ld_shared_4(smem)); });
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) delta[h] = numbers[h][0];
  }
  template <int kCount, class Function>
  FFPA_DEVICE void for_shared_numbers(bool takes_part, float (&numbers)[2][kCount], const Function& function) const {
    if (!takes_part) return;
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      FFPA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        numbers[h][i] = function(this->shared_numbers_smem() + (i * kTile + row_of_lane(h)) * 4, numbers[h][i]);
      }
    }
  }

  // Returns dO·O of the row that the lane has in half `h`.
  FFPA_DEVICE float grad_out_dot_out(const Rows& rows, int h) const {
    const int row = q_.begin + rows.first + min_of(row_of_lane(h), n_q() - 1 - rows.first);
    const uint16_t* out = row_of(attention_.out, batch_, rows.head, row);
    const uint16_t* grad_out = row_of(params_.grad_out, batch_, rows.head, row);
    float sum = 0;
    FFPA_NO_UNROLL
    for (int column = lane_ % 4 * 8; column < attention_.d_v; column += 4 * 8) {
      add_dot_of_8<Element>(sum, out + column, grad_out + column);
    }
    return tile::sum_of_lanes(sum);
  }
};

}  // namespace ffpa
