// Reads a mask two keys at a time: where its keys are adjacent and its rows begin at even places, a lane's pair of keys
// is one word. Words may be loaded long before scores are there.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/params/attention_params.h"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "tile/fragments.cuh"

namespace ffpa {

// Says whether the call has a mask that adds to scores.
FFPA_DEVICE bool is_added(const MaskView& mask) { return mask.kind > MaskKind::kBool; }

// Says whether the call has a mask that can be read so. Masks of 32 bits would take two words a pair.
FFPA_DEVICE bool has_mask_pairs(const MaskView& mask) {
  if (mask.kind == MaskKind::kNone || mask.kind == MaskKind::kFloat) return false;
  const int64_t size = mask.kind == MaskKind::kBool ? 1 : 2;
  const int64_t places = int64_t(mask.data) | mask.batch_stride | mask.head_stride | mask.row_stride;
  return mask.key_stride == size && places % (2 * size) == 0;
}

// The mask's words of 16 rows: those of the two that a lane has.
template <class Fragments = tile::AdjacentFragments>
class MaskPairs {
 public:
  MaskPairs() = default;
  // `row` and `key` are where they begin; `key` is even. Rows past the last one do not count.
  template <class Block>
  FFPA_DEVICE MaskPairs(const MaskView& mask, const Block& block, int row, int key, int lane) : kind_(mask.kind) {
    const uint8_t* of_entry = mask.data + block.batch() * mask.batch_stride;
    FFPA_UNROLL
    for (int h = 0; h < 2; ++h) {
      const RowPlace at = place_in(block, row + tile::c_coordinate(lane, 2 * h).row);
      rows_[h] = of_entry + at.head * mask.head_stride + min_of(at.row, block.n_q() - 1) * mask.row_stride +
                 (key + Fragments::first_column(lane)) * mask.key_stride;
    }
  }

  // Loads the words of the fragments of keys from `first` on, all of which exist: [fragment][half of rows]. They begin
  // `keys` further.
  template <int kCount>
  FFPA_DEVICE void load(uint32_t (&words)[kCount], int first, int keys = 0) const {
    const auto column = [first](int i) { return Fragments::column_of(first + i / 2); };
    if (kind_ == MaskKind::kBool) {
      const uint8_t* const rows[2] = {rows_[0] + keys, rows_[1] + keys};
      FFPA_UNROLL
      for (int i = 0; i < kCount; ++i) words[i] = ptx::ld_global_2(rows[i % 2] + column(i));
    } else {
      const uint8_t* const rows[2] = {rows_[0] + int64_t{2} * keys, rows_[1] + int64_t{2} * keys};
      FFPA_UNROLL
      for (int i = 0; i < kCount; ++i) words[i] = ptx::ld_global_4(rows[i % 2] + 2 * column(i));
    }
  }

  // Adds the mask to scores, or makes -inf of those that it hides, whatever they are. A bool mask may have products,
  // too.
  template <int kN>
  FFPA_DEVICE void add_to(float (&numbers)[1][kN][4], const uint32_t (&words)[kN * 2]) const {
    const auto for_each = [&](const auto& masked) {
      FFPA_UNROLL
      for (int i = 0; i < kN * 2; ++i) {
        masked(reinterpret_cast<float (&)[2]>(numbers[0][i / 2][i % 2 * 2]), words[i]);
      }
    };
    const auto add = [](float& number, float mask) { number = mask == -kInfinity ? mask : number + mask; };
    if (kind_ == MaskKind::kBool) {
      for_each([](float (&pair)[2], uint32_t word) {
        if ((word & 0x00ff) == 0) pair[0] = -kInfinity;
        if ((word & 0xff00) == 0) pair[1] = -kInfinity;
      });
    } else if (kind_ == MaskKind::kHalf) {
      for_each([&](float (&pair)[2], uint32_t word) {
        float low, high;
        ptx::unpack<Half>(word, low, high);
        add(pair[0], low);
        add(pair[1], high);
      });
    } else {
      for_each([&](float (&pair)[2], uint32_t word) {
        add(pair[0], float_from_bits(word << 16));
        add(pair[1], float_from_bits(word & 0xffff0000));
      });
    }
  }

 private:
  MaskKind kind_ = MaskKind::kNone;
  const uint8_t* rows_[2] = {};
};

// The words of a row tile's scores, which a kernel loads while products run, one tile of keys after the other.
template <int kSteps, int kN>
class MaskAhead {
 public:
  // `in_pairs` says whether the mask can be read so.
  template <class Block>
  FFPA_DEVICE MaskAhead(bool in_pairs, const MaskView& mask, const Block& rows, int row, int lane)
      : keys_(in_pairs ? rows.n_k() : 0) {
    if (in_pairs) pairs_ = MaskPairs<>(mask, rows, row, 0, lane);
  }

  // Loads the words of the keys from `key` on, unless some of them do not exist.
  FFPA_DEVICE void load(int key) {
    is_there_ = key + kSteps * kN * tile::kMmaN <= keys_;
    FFPA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      if (is_there_) {
        pairs_.load(words_[step], 0, key + step * kN * tile::kMmaN);
      } else {  // else they would stay in registers from tile to tile
        FFPA_UNROLL
        for (uint32_t& word : words_[step]) word = 0;
      }
    }
  }

  // Adds them to the scores of a step, and says whether they are there.
  FFPA_DEVICE bool add_to(float (&scores)[1][kN][4], int step) const {
    if (is_there_) pairs_.add_to(scores, words_[step]);
    return is_there_;
  }

 private:
  MaskPairs<> pairs_;
  uint32_t words_[kSteps][2 * kN];
  int keys_;
  bool is_there_ = false;
};

// It stands for the words where none are loaded ahead.
struct NoMaskAhead {
  NoMaskAhead() = default;
  template <class Block>
  FFPA_DEVICE NoMaskAhead(bool, const MaskView&, const Block&, int, int) {}

  FFPA_DEVICE void load(int) {}
  template <class Scores>
  FFPA_DEVICE bool add_to(Scores&, int) const {
    return false;
  }
};

// Adds a mask to scores, some fragments at a time: registers are scarce.
template <class Fragments, int kM, int kN, class Block>
FFPA_DEVICE void add_mask_pairs(float (&scores)[kM][kN][4], const MaskView& mask, const Block& block, int row, int key,
                                int lane) {
  constexpr int kMost = 8;
  FFPA_UNROLL
  for (int m = 0; m < kM; ++m) {
    const MaskPairs<Fragments> pairs(mask, block, row + m * 16, key, lane);
    const auto add = [&](auto count, int first) {
      constexpr int kCount = decltype(count)::value;
      uint32_t words[kCount * 2];
      pairs.load(words, first);
      pairs.add_to(reinterpret_cast<float (&)[1][kCount][4]>(scores[m][first]), words);
    };
    FFPA_UNROLL
    for (int first = 0; first + kMost <= kN; first += kMost) add(std::integral_constant<int, kMost>(), first);
    if constexpr (kN % kMost != 0) add(std::integral_constant<int, kN % kMost>(), kN / kMost * kMost);
  }
}

}  // namespace ffpa
