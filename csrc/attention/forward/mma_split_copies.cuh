// Brings the steps of the split-D forward into shared memory, by all threads together; and makes Q what fragments of
// 8-bit keys are multiplied with.
#pragma once

#include <cstdint>

#include "attention/forward/mma_split.cuh"
#include "attention/rows/paged_copy.cuh"
#include "attention/rows/row_tile.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/instructions.cuh"
#include "tile/e4m3_fragments.cuh"
#include "tile/fragments.cuh"
#include "tile/tile_copy.cuh"

namespace ffpa {

// Makes Q, which is resident, what fragments of 8-bit keys are multiplied with.
template <class Config>
FFPA_DEVICE void ForwardMmaSplit<Config>::prepare_queries(int rows, const KeyScales& scales) {
  constexpr int kPairs = kKeyColumns / 16;  // two chunks each, in a step
  ptx::cp_async_wait_group<0>();            // Q alone is in a group
  ptx::sync_block();
  const auto chunks_of = [&](int row, int pair, uint32_t (&addresses)[2]) {
    const uint32_t step_smem = q_smem_ + pair / kPairs * Config::kQueryStepBytes;
    FFPA_UNROLL
    for (int i = 0; i < 2; ++i) addresses[i] = step_smem + Config::query_layout().offset(row, pair % kPairs * 2 + i);
  };
  tile::prepare_rows<Element, kRows, Config::kWarps>(rows, key_steps_ * kPairs, chunks_of, scales.k, partial_smem_,
                                                     thread_);
  ptx::sync_block();
  tile::for_each_row<kScoreM>([&](int m, int h) { key_scale_[m][h] = statistic(partial_smem_, score_row(m, h)); });
  value_scale_ = scales.v;
  ptx::sync_block();  // all have read the factors
}

// Starts the copies of the next step in the ring of the operand, if there is one.
template <class Config>
template <typename ForwardMmaSplit<Config>::Operand kOperand>
FFPA_DEVICE void ForwardMmaSplit<Config>::load_next_step() {
  constexpr bool kOnlyKeys = kOwnRings && kOperand == kOfKeys, kOnlyValues = kOwnRings && kOperand == kOfValues;
  Feed& next = feed<kOperand>();
  if (next.tile == end_tile_) return;
  const uint32_t slot = next.ring.begin_fill();
  if (kOnlyKeys || (!kOnlyValues && next.step < key_steps_)) {
    copy_keys(slot, next.tile, next.step);
  } else {
    copy_values(slot, next.tile, next.step - key_steps_, next.group);
  }
  next.ring.end_fill();

  if (++next.step < key_steps_ + (kOnlyKeys ? 0 : kValueSteps)) return;
  next.step = kOnlyValues ? key_steps_ : 0;
  if (Config::kStreamed && !kOnlyKeys && ++next.group < Config::column_groups(params_)) {
    next.step = key_steps_;
    return;
  }
  next.group = 0;
  ++next.tile;
  if constexpr (kLooksAhead) look_ahead(next.tile);
}

// Lanes know where their runs of a tile lie, and look up those of the next: no copy waits for the table.
template <class Config>
FFPA_DEVICE void ForwardMmaSplit<Config>::look_ahead(int tile) {
  k_of_lane_ = run_of(window_of_k(params_, keys_.get()), page_ahead_, tile * kKeys);
  v_of_lane_ = run_of(window_of_v(params_, keys_.get()), page_ahead_, tile * kKeys);
  page_ahead_ = look_up(tile + 1);
}
template <class Config>
template <int kCount>
FFPA_DEVICE int ForwardMmaSplit<Config>::look_up_keys(int key) const {
  return page_of_lane<kCount>(arguments_.key_pages, params_.paged, keys_.get(), key, lane_);
}
template <class Config>
template <class Window>
FFPA_DEVICE const uint16_t* ForwardMmaSplit<Config>::run_of(const Window& window, int page, int key) const {
  return run_of_lane(arguments_.key_pages, params_.paged, keys_.get(), window, page, key, lane_);
}

template <class Config>
FFPA_DEVICE void ForwardMmaSplit<Config>::copy_queries(uint32_t target_smem, const SharedRowTile& rows,
                                                       int step) const {
  copy_queries_async<kRows, kKeyColumns, kThreads>(target_smem, Config::query_layout(), params_, rows,
                                                   step * kKeyColumns, thread_);
}

template <class Config>
FFPA_DEVICE void ForwardMmaSplit<Config>::copy_keys(uint32_t slot, int tile, int step) const {
  copy_async<kKeys, kKeyColumns>(slot, Config::key_layout(), window_of_k(params_, keys_.get()), k_of_lane_,
                                 tile * kKeys, step * kKeyColumns);
  if (!params_.q_resident) copy_queries(slot + Config::kKeyStepBytes, rows_.get(), step);
}

template <class Config>
FFPA_DEVICE void ForwardMmaSplit<Config>::copy_values(uint32_t slot, int tile, int step, int group) const {
  copy_async<kValueRows, kColumns>(slot, Config::value_layout(), window_of_v(params_, keys_.get()), v_of_lane_,
                                   tile * kKeys + step * kValueRows,
                                   Config::kStreamed ? group * kColumns : first_column_);
}

// Starts the copy of rows of K or V from `key` on, and of columns from `column` on.
template <class Config>
template <int kCopiedRows, int kCopiedColumns, class Window>
FFPA_DEVICE void ForwardMmaSplit<Config>::copy_async(uint32_t slot, const typename Config::Layout& layout,
                                                     Window window, const uint16_t* of_lane, int key,
                                                     int column) const {
  if constexpr (Config::kPaged) {
    constexpr int kPerElement = Config::kPerElement;
    window.columns /= kPerElement;
    const int first_lane = kLooksAhead ? key % kKeys / kPageStep : 0;
    if (!kLooksAhead) of_lane = run_of(window, look_up_keys<kCopiedRows>(key), key);
    copy_paged_keys_async<kCopiedRows, kCopiedColumns / kPerElement, kThreads>(
        slot, layout, window, of_lane, first_lane, key, column / kPerElement, thread_);
  } else {
    tile::copy_tile_async<kCopiedRows, kCopiedColumns, kThreads>(slot, layout, tile::window_at(window, key, column),
                                                                 thread_);
  }
}

}  // namespace ffpa
