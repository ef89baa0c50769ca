// Cases for csrc/tile: small matrix products through shared memory, layouts, guarded copies, accumulators, the ring.
#pragma once

#include "cases/case.h"
#include "ptx/instructions.cuh"
#include "store_tile.cuh"
#include "tile/fragments.cuh"
#include "tile/multiply.cuh"
#include "tile/smem_layout.cuh"
#include "tile/stage_ring.cuh"
#include "tile/tile_copy.cuh"

namespace ffpa::cases {

inline constexpr int kProductRows = 16;
inline constexpr int kProductColumns = 16;
inline constexpr int kProductDepth = 64;
inline constexpr int kProductTile = 16 * 64;  // elements of an operand

// Computes C[16 × 16] = A · B of halves, with A [row][k] or [k][row] and B [column][k] or [k][column] in global memory.
template <bool kATransposed, bool kBTransposed, bool kPadded>
FFPA_KERNEL(32, 1)
void tile_product_kernel(const uint32_t* input, uint32_t* output) {
  constexpr int kRowBytesA = (kATransposed ? kProductRows : kProductDepth) * 2;
  constexpr int kRowBytesB = (kBTransposed ? kProductColumns : kProductDepth) * 2;
  constexpr tile::RowLayout kLayoutA(kRowBytesA, kPadded);
  constexpr tile::RowLayout kLayoutB(kRowBytesB, kPadded);
  constexpr int kStoredRowsA = kATransposed ? kProductDepth : kProductRows;
  constexpr int kStoredRowsB = kBTransposed ? kProductDepth : kProductColumns;
  const int lane = ptx::lane_id();
  const uint32_t a_smem = ptx::dynamic_smem();
  const uint32_t b_smem = a_smem + kLayoutA.bytes(kStoredRowsA);

  const uint16_t* a_gmem = reinterpret_cast<const uint16_t*>(input);
  const uint16_t* b_gmem = a_gmem + kProductTile;
  tile::copy_tile_async<kStoredRowsA, kRowBytesA / 2, 32>(a_smem, kLayoutA,
                                                          {a_gmem, kRowBytesA / 2, kStoredRowsA, kRowBytesA / 2}, lane);
  tile::copy_tile_async<kStoredRowsB, kRowBytesB / 2, 32>(b_smem, kLayoutB,
                                                          {b_gmem, kRowBytesB / 2, kStoredRowsB, kRowBytesB / 2}, lane);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  ptx::sync_warp();

  float c[2][4] = {};
  for (int step = 0; step < kProductDepth / tile::kMmaK; ++step) {
    uint32_t a[4], b[4];
    if (kATransposed) {
      const tile::Coordinate at = tile::ldmatrix_a_trans(lane);
      ptx::ldmatrix_x4_trans(a, a_smem + kLayoutA.offset(step * tile::kMmaK + at.row, at.column));
    } else {
      const tile::Coordinate at = tile::ldmatrix_a(lane);
      ptx::ldmatrix_x4(a, a_smem + kLayoutA.offset(at.row, step * 2 + at.column));
    }
    if (kBTransposed) {
      const tile::Coordinate at = tile::ldmatrix_b_pair_trans(lane);
      ptx::ldmatrix_x4_trans(b, b_smem + kLayoutB.offset(step * tile::kMmaK + at.row, at.column));
    } else {
      const tile::Coordinate at = tile::ldmatrix_b_pair(lane);
      ptx::ldmatrix_x4(b, b_smem + kLayoutB.offset(at.row, step * 2 + at.column));
    }
    ptx::mma_m16n8k16_f32<Half>(c[0], a, b[0], b[1]);
    ptx::mma_m16n8k16_f32<Half>(c[1], a, b[2], b[3]);
  }
  for (int half = 0; half < 2; ++half) {
    for (int value = 0; value < 4; ++value) {
      const tile::Coordinate at = tile::c_coordinate(lane, value);
      ptx::st_global_4(output + at.row * kProductColumns + half * 8 + at.column, float_bits(c[half][value]));
    }
  }
}

// Copies a 32 × kColumns window at (row 3, column 8) of a 21-row, 40-column matrix, and writes out the whole tile.
template <int kColumns, bool kPadded>
FFPA_KERNEL(64, 1)
void guarded_copy_kernel(const uint32_t* input, uint32_t* output) {
  constexpr int kRows = 32;
  constexpr tile::RowLayout kLayout(kColumns * 2, kPadded);
  const int thread = ptx::thread_x();
  const uint32_t smem = ptx::dynamic_smem();
  const tile::GmemWindow matrix{reinterpret_cast<const uint16_t*>(input), 48, 21, 40};
  tile::copy_tile_async<kRows, kColumns, 64>(smem, kLayout, tile::window_at(matrix, 3, 8), thread);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  ptx::sync_block();
  tile::store_tile<kRows, kColumns, 64>({reinterpret_cast<uint16_t*>(output), kColumns, kRows, kColumns}, smem, kLayout,
                                        thread);
}

// A matrix of 32 rows goes into shared memory by copies and comes out by ldmatrix, 16 rows of one chunk at a time.
inline constexpr int kLayoutRows = 32;
template <int kRowBytes, bool kPadded>
FFPA_KERNEL(32, 1)
void row_layout_kernel(const uint32_t* input, uint32_t* output) {
  constexpr tile::RowLayout kLayout(kRowBytes, kPadded);
  constexpr int kColumns = kRowBytes / 2;
  const int lane = ptx::lane_id();
  const uint32_t smem = ptx::dynamic_smem();
  const tile::GmemWindow matrix{reinterpret_cast<const uint16_t*>(input), kColumns, kLayoutRows, kColumns};
  tile::copy_tile_async<kLayoutRows, kColumns, 32>(smem, kLayout, matrix, lane);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  ptx::sync_warp();
  for (int chunk = 0; chunk < kRowBytes / tile::kChunkBytes; ++chunk) {
    uint32_t pairs[kLayoutRows / 8];
    ptx::ldmatrix_x4(pairs, smem + kLayout.offset(lane, chunk));
    for (int i = 0; i < kLayoutRows / 8; ++i) {
      ptx::st_global_4(output + (i * 8 + lane / 4) * (kRowBytes / 4) + chunk * 4 + lane % 4, pairs[i]);
    }
  }
}

// Writes what Accumulator<Type> holds after set and after scale_rows, and whether multiply_add equals the instruction.
template <class Type>
FFPA_KERNEL(32, 1)
void accumulator_kernel(const uint32_t* input, uint32_t* output) {
  const int lane = ptx::lane_id();
  float values[4], factor[2];
  for (int e = 0; e < 4; ++e) values[e] = float_from_bits(ptx::ld_global_4(input + lane * 6 + e));
  for (int h = 0; h < 2; ++h) factor[h] = float_from_bits(ptx::ld_global_4(input + lane * 6 + 4 + h));
  uint32_t* mine = output + lane * 9;
  const auto put = [&](const tile::Accumulator<Type>& accumulator, int at) {
    float held[4];
    accumulator.get(held);
    for (int e = 0; e < 4; ++e) ptx::st_global_4(mine + at + e, float_bits(held[e]));
  };
  tile::Accumulator<Type> accumulator;
  accumulator.set(values);
  put(accumulator, 0);
  tile::scale_rows(accumulator, factor);
  put(accumulator, 4);

  const uint32_t a[4] = {ptx::pack<Half>(values[0], values[1]), ptx::pack<Half>(values[2], values[3]),
                         ptx::pack<Half>(values[3], values[0]), ptx::pack<Half>(factor[0], factor[1])};
  tile::Accumulator<Type> expected = accumulator;
  accumulator.template multiply_add<Half>(a, a[1], a[3]);
  if constexpr (sizeof(Type) == sizeof(float)) {
    ptx::mma_m16n8k16_f32<Half>(expected.c, a, a[1], a[3]);
  } else {
    ptx::mma_m16n8k16_f16(expected.c, a, a[1], a[3]);
  }
  float got[4], want[4];
  accumulator.get(got);
  expected.get(want);
  bool same = true;
  for (int e = 0; e < 4; ++e) same = same && float_bits(got[e]) == float_bits(want[e]);
  ptx::st_global_4(mine + 8, same);
}

// Uses the ring as a kernel with several work items does: it goes on where the last item left it, and every item fills
// it ahead anew. Each thread copies its 16 bytes of a step, and reads those of the opposite thread.
inline constexpr int kStageRingItems = 3;
inline constexpr int kStageRingSteps = 7;  // steps per item: an item ends while the ring is amid a round
template <int kThreads>
FFPA_KERNEL(kThreads, 1)
void stage_ring_kernel(const uint32_t* input, uint32_t* output, int stages) {
  const int thread = ptx::thread_x();
  const uint32_t barriers = ptx::dynamic_smem();
  tile::StageRing<kThreads> ring(barriers, barriers + 128, stages, kThreads * 16);
  ring.init(thread);
  ptx::sync_block();
  for (int item = 0; item < kStageRingItems; ++item) {
    const uint32_t* item_in = input + item * kStageRingSteps * kThreads * 4;
    uint32_t* item_out = output + item * kStageRingSteps * kThreads * 4;
    int filled = 0;
    const auto fill = [&] {
      if (filled == kStageRingSteps) return;
      ptx::cp_async_16_or_zero(true, ring.begin_fill() + thread * 16, item_in + (filled++ * kThreads + thread) * 4);
      ring.end_fill();
    };
    for (int step = 0; step < ring.ahead(); ++step) fill();
    for (int step = 0; step < kStageRingSteps; ++step) {
      fill();
      uint32_t value[4];
      ptx::ld_shared_16(value, ring.begin_use() + (kThreads - 1 - thread) * 16);
      ring.end_use();
      for (uint32_t& word : value) word *= 2;
      ptx::st_global_16(item_out + (step * kThreads + thread) * 4, value);
    }
  }
}

inline constexpr int kStageRingThreads = 96;
inline constexpr int kStageRingWords = kStageRingItems * kStageRingSteps * kStageRingThreads * 4;

// Runs the same steps through rings of 1 to 4 slots, one output after the other.
inline LaunchStatus run_stage_rings(const uint32_t* input, uint32_t* output) {
  LaunchShape shape;
  shape.threads = kStageRingThreads;
  for (int stages = 1; stages <= tile::kMaxStages; ++stages) {
    shape.smem_bytes = 128 + stages * kStageRingThreads * 16;
    const LaunchStatus status = launch(shape, nullptr, stage_ring_kernel<kStageRingThreads>, input,
                                       output + (stages - 1) * kStageRingWords, stages);
    if (!status.ok()) return status;
  }
  return {};
}

template <int kRowBytes, bool kPadded>
Case layout_case(const char* name) {
  constexpr int kWords = kLayoutRows * kRowBytes / 4;
  constexpr int kSmem = kLayoutRows * (kRowBytes + tile::kChunkBytes);
  return {name, 80, Input::kBits, kWords, kWords, 0, run_kernel<row_layout_kernel<kRowBytes, kPadded>, 32, kSmem>};
}

inline std::vector<Case> tile_cases() {
  constexpr int kSmem = 16 << 10;
  constexpr int kProductIn = kProductTile;  // words: two operands of halves
  constexpr int kProductOut = kProductRows * kProductColumns;
  return {
      {"tile/product_nt_swizzled", 80, Input::kHalves, kProductIn, kProductOut, 0,
       run_kernel<tile_product_kernel<false, false, false>, 32, kSmem>},
      {"tile/product_nn_swizzled", 80, Input::kHalves, kProductIn, kProductOut, 0,
       run_kernel<tile_product_kernel<false, true, false>, 32, kSmem>},
      {"tile/product_tt_swizzled", 80, Input::kHalves, kProductIn, kProductOut, 0,
       run_kernel<tile_product_kernel<true, false, false>, 32, kSmem>},
      {"tile/product_tn_padded", 80, Input::kHalves, kProductIn, kProductOut, 0,
       run_kernel<tile_product_kernel<true, true, true>, 32, kSmem>},
      {"tile/copy_16_swizzled", 80, Input::kBits, 21 * 24, 32 * 8, 0,
       run_kernel<guarded_copy_kernel<16, false>, 64, kSmem>},
      {"tile/copy_64_swizzled", 80, Input::kBits, 21 * 24, 32 * 32, 0,
       run_kernel<guarded_copy_kernel<64, false>, 64, kSmem>},
      {"tile/copy_24_padded", 80, Input::kBits, 21 * 24, 32 * 12, 0,
       run_kernel<guarded_copy_kernel<24, true>, 64, kSmem>},
      layout_case<32, false>("tile/layout_32_swizzled"),
      layout_case<64, false>("tile/layout_64_swizzled"),
      layout_case<128, false>("tile/layout_128_swizzled"),
      layout_case<192, false>("tile/layout_192_swizzled"),
      layout_case<256, false>("tile/layout_256_swizzled"),
      layout_case<320, false>("tile/layout_320_swizzled"),
      layout_case<1152, false>("tile/layout_1152_swizzled"),
      layout_case<48, true>("tile/layout_48_padded"),
      layout_case<64, true>("tile/layout_64_padded"),
      layout_case<160, true>("tile/layout_160_padded"),
      layout_case<320, true>("tile/layout_320_padded"),
      layout_case<512, true>("tile/layout_512_padded"),
      warp_case<accumulator_kernel<float>>("tile/accumulator_f32", Input::kFloats, 6, 9),
      warp_case<accumulator_kernel<Half>>("tile/accumulator_f16", Input::kFloats, 6, 9),
      {"tile/stage_ring", 80, Input::kBits, kStageRingWords, 4 * kStageRingWords, 0, run_stage_rings},
  };
}

}  // namespace ffpa::cases
