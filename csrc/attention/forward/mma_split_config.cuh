// The shapes of a split-D forward kernel: tiles, warps, shared memory, launch.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/params/attention_params.h"
#include "attention/rows/item_grid.cuh"
#include "attention/rows/paged_copy.cuh"
#include "attention/rows/row_tiles.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "base/types.h"
#include "ptx/launch_types.h"
#include "tile/kept_value.cuh"
#include "tile/smem_layout.cuh"
#include "tile/stage_ring.cuh"

namespace ffpa {

// Fields has Dtype; AccQk and AccPv, what products accumulate in; kColumns, the columns of O that registers hold at a
// time; kRows and kKeys of a tile; kKeyColumns and kValueRows of a step; kStreamed, whether O goes through global
// scratch; kOwnRings, whether K and V have a ring each; kPadQ, kPadK, kPadV, whether rows in shared memory are padded
// instead of swizzled; kSerial, whether fragments are loaded when they are needed and not ahead; kPaged, whether keys
// lie in pages; kE4m3, whether they are 8-bit floats there, which become Half on the way to the tensor cores.
template <class Fields>
struct ForwardMmaSplitConfig : Fields {
  using Params = AttentionParams;
  using Fields::kColumns;
  using Fields::kKeyColumns;
  using Fields::kKeys;
  using Fields::kRows;
  using Fields::kValueRows;

  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * 32;
  // Where rows are few, two blocks hide each other's softmax.
  static constexpr int kMinBlocksPerSm = kRows < 32 ? 2 : 1;
  static constexpr int kAhead = Fields::kSerial ? 0 : 1;

  // Two teams of warps share the rows (up to 32 rows are all one team's). Only the ring of K and V steps connects them,
  // so one computes products while the other is in its softmax.
  static constexpr int kTeams = kRows >= 64 ? 2 : 1;
  static constexpr int kTeamWarps = kWarps / kTeams;
  static constexpr int kTeamRows = kRows / kTeams;

  // Each warp of a team has 32 rows of S, if there are as many.
  static constexpr int kScoreWarpRows = min_of(kTeamRows, 32);
  static constexpr int kScoreWarpsByKeys = kTeamWarps / (kTeamRows / kScoreWarpRows);
  static constexpr int kScoreWarpKeys = kKeys / kScoreWarpsByKeys;
  static_assert(kTeamRows % kScoreWarpRows == 0 && kScoreWarpKeys % 16 == 0, "warps share S evenly");

  // Each warp of a team has all rows of O, so that V is read once for them, and every kTeamWarps-th pair of 8-column
  // fragments.
  static constexpr int kOutPairs = kColumns / 16;
  static constexpr int kOutWarpPairs = ceil_div(kOutPairs, kTeamWarps);
  static_assert(kColumns % 64 == 0, "a row of a V step fills whole passes over the banks");
  static_assert(kKeyColumns % 32 == 0 && kValueRows % 16 == 0 && kKeys % kValueRows == 0, "steps are whole products");

  // 8-bit rows are copied as rows of half as many elements.
  // 8-bit V becomes Half at once, and P is rounded to it as well.
  using Probability = std::conditional_t<Fields::kE4m3, Half, typename Fields::Dtype>;
  static constexpr int kKeyBytes = Fields::kE4m3 ? 1 : 2, kPerElement = 2 / kKeyBytes;
  static_assert(!(Fields::kPaged && Fields::kOwnRings), "lanes know the pages of one tile at a time");
  static_assert(!(Fields::kE4m3 && Fields::kStreamed), "8-bit keys are read at level 1");
  static_assert(!Fields::kE4m3 || (Fields::kPaged && kKeyColumns % 32 == 0 && kValueRows % 32 == 0),
                "8-bit fragments are loaded two products at a time");

  // Shared memory holds slots of the ring, then P, row statistics, barriers, the row tile and where its keys lie, and Q
  // where it is resident.
  using Layout = tile::RowLayout;
  FFPA_HOST_DEVICE static constexpr Layout query_layout() {
    return Layout(kKeyColumns * 2, Fields::kPadQ);
  }  // layout of one step
  FFPA_HOST_DEVICE static constexpr Layout key_layout() { return Layout(kKeyColumns * kKeyBytes, Fields::kPadK); }
  FFPA_HOST_DEVICE static constexpr Layout value_layout() { return Layout(kColumns * kKeyBytes, Fields::kPadV); }
  FFPA_HOST_DEVICE static constexpr Layout probability_layout() { return Layout(kKeys * 2); }
  static constexpr uint32_t kQueryStepBytes = query_layout().bytes(kRows);
  static constexpr uint32_t kKeyStepBytes = key_layout().bytes(kKeys);
  static constexpr uint32_t kValueStepBytes = value_layout().bytes(kValueRows);
  static constexpr uint32_t kProbabilityBytes = probability_layout().bytes(kRows);
  static constexpr uint32_t kStatisticBytes = kRows * sizeof(float);
  using Ring = tile::StageRing<kThreads>;

  FFPA_HOST_DEVICE static int key_steps(const Params& params) { return ceil_div(params.d_qk, kKeyColumns); }

  // Return the bytes of a slot in the ring of K, or of K and V; and of all slots, those of the ring of V behind them.
  FFPA_HOST_DEVICE static uint32_t slot_bytes(const Params& params) {
    const uint32_t key_bytes = kKeyStepBytes + (params.q_resident ? 0 : kQueryStepBytes);
    return Fields::kOwnRings ? key_bytes : max_of(key_bytes, kValueStepBytes);
  }
  FFPA_HOST_DEVICE static uint32_t all_slots_bytes(const Params& params) {
    return params.stages * slot_bytes(params) + (Fields::kOwnRings ? params.value_stages * kValueStepBytes : 0);
  }
  static constexpr uint32_t kBarrierBytes = (Fields::kOwnRings ? 2 : 1) * Ring::kBarrierBytes;
  using KeptKeys = tile::KeptValue<MmaKeys<Fields::kPaged>>;

  static uint32_t smem_bytes(const Params& params) {
    return all_slots_bytes(params) + kProbabilityBytes + (kScoreWarpsByKeys + 1) * kStatisticBytes + kBarrierBytes +
           KeptRows::kBytes + KeptKeys::kBytes + (params.q_resident ? key_steps(params) * kQueryStepBytes : 0);
  }

  // Returns the number of passes over the columns of O: one where registers hold them all.
  FFPA_HOST_DEVICE static int column_groups(const Params& params) { return ceil_div(params.d_v, kColumns); }

  using Arguments = MmaArguments<kRows, Fields::kPaged>;

  // An item is (row tile, part of its keys) and, unless O is streamed, one of these column groups.
  FFPA_HOST_DEVICE static int groups_of_items(const Params& params) {
    return Fields::kStreamed ? 1 : column_groups(params);
  }

  static LaunchShape launch_shape(const Params& params) {
    const int items = RowTiles<kRows>(params).count() * groups_of_items(params);
    const int most_blocks = Fields::kStreamed ? params.resident_blocks : kLargestInt;
    return {grid_of(params, items, most_blocks), kThreads, smem_bytes(params)};
  }
};

}  // namespace ffpa
