// Cases for csrc/tile: whole small matrix products through shared memory, and guarded copies.
#pragma once

#include "cases/case.h"
#include "ptx/barrier.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "tile/fragments.cuh"
#include "tile/smem_layout.cuh"
#include "tile/stage_ring.cuh"
#include "tile/tile_copy.cuh"

namespace ffpa::cases {

inline constexpr int kProductRows = 16;
inline constexpr int kProductColumns = 16;
inline constexpr int kProductDepth = 64;
inline constexpr int kProductTile = 16 * 64;  // elements of an operand

// C[16 × 16] = A · B of halves, with A [row][k] or [k][row] and B [column][k] or [k][column] in global memory.
template <bool kATransposed, bool kBTransposed, class Layout>
FFPA_KERNEL(32, 1)
void tile_product_kernel(const uint32_t* input, uint32_t* output) {
  constexpr int kRowBytesA = (kATransposed ? kProductRows : kProductDepth) * 2;
  constexpr int kRowBytesB = (kBTransposed ? kProductColumns : kProductDepth) * 2;
  constexpr Layout kLayoutA(kRowBytesA);
  constexpr Layout kLayoutB(kRowBytesB);
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
  tile::wait_for_copies(0);
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
template <int kColumns, class Layout>
FFPA_KERNEL(64, 1)
void guarded_copy_kernel(const uint32_t* input, uint32_t* output) {
  constexpr int kRows = 32;
  constexpr Layout kLayout(kColumns * 2);
  const int thread = ptx::thread_x();
  const uint32_t smem = ptx::dynamic_smem();
  const tile::GmemWindow matrix{reinterpret_cast<const uint16_t*>(input), 48, 21, 40};
  tile::copy_tile_async<kRows, kColumns, 64>(smem, kLayout, tile::window_at(matrix, 3, 8), thread);
  ptx::cp_async_commit_group();
  tile::wait_for_copies(0);
  ptx::sync_block();
  tile::store_tile<kRows, kColumns, 64>({reinterpret_cast<uint16_t*>(output), kColumns, kRows, kColumns}, smem, kLayout,
                                        thread);
}

// Ring lengths 1 … 4 at run time: 12 steps of 128 bytes go through the ring, each doubled on its way out.
FFPA_KERNEL(32, 1) void stage_ring_kernel(const uint32_t* input, uint32_t* output) {
  constexpr int kSteps = 12;
  constexpr uint32_t kStageBytes = 512;
  const int lane = ptx::lane_id();
  const uint32_t smem = ptx::dynamic_smem() + lane * 16;
  for (int stages = 1; stages <= 4; ++stages) {
    tile::StageRing filling(stages, kStageBytes);
    tile::StageRing using_(stages, kStageBytes);
    const auto fill = [&](int step) {
      if (step < kSteps) ptx::cp_async_16(smem + filling.offset(), input + (step * 32 + lane) * 4);
      ptx::cp_async_commit_group();
      filling.advance();
    };
    for (int step = 0; step < stages - 1; ++step) fill(step);
    for (int step = 0; step < kSteps; ++step) {
      fill(step + stages - 1);
      tile::wait_for_copies(stages - 1);
      uint32_t value[4];
      ptx::ld_shared_16(value, smem + using_.offset());
      for (uint32_t& word : value) word = 2 * word + using_.parity();
      ptx::st_global_16(output + ((stages - 1) * kSteps * 32 + step * 32 + lane) * 4, value);
      using_.advance();
    }
    tile::wait_for_copies(0);
  }
}

inline std::vector<Case> tile_cases() {
  using tile::PaddedLayout;
  using tile::SwizzledLayout;
  constexpr int kSmem = 16 << 10;
  constexpr int kProductIn = kProductTile;  // words: two operands of halves
  constexpr int kProductOut = kProductRows * kProductColumns;
  return {
      {"tile/product_nt_swizzled", 80, Input::kHalves, kProductIn, kProductOut, 0,
       run_kernel<tile_product_kernel<false, false, SwizzledLayout>, 32, kSmem>},
      {"tile/product_nn_swizzled", 80, Input::kHalves, kProductIn, kProductOut, 0,
       run_kernel<tile_product_kernel<false, true, SwizzledLayout>, 32, kSmem>},
      {"tile/product_tt_swizzled", 80, Input::kHalves, kProductIn, kProductOut, 0,
       run_kernel<tile_product_kernel<true, false, SwizzledLayout>, 32, kSmem>},
      {"tile/product_tn_padded", 80, Input::kHalves, kProductIn, kProductOut, 0,
       run_kernel<tile_product_kernel<true, true, PaddedLayout>, 32, kSmem>},
      {"tile/copy_16_swizzled", 80, Input::kBits, 21 * 24, 32 * 8, 0,
       run_kernel<guarded_copy_kernel<16, SwizzledLayout>, 64, kSmem>},
      {"tile/copy_64_swizzled", 80, Input::kBits, 21 * 24, 32 * 32, 0,
       run_kernel<guarded_copy_kernel<64, SwizzledLayout>, 64, kSmem>},
      {"tile/copy_24_padded", 80, Input::kBits, 21 * 24, 32 * 12, 0,
       run_kernel<guarded_copy_kernel<24, PaddedLayout>, 64, kSmem>},
      {"tile/stage_ring", 80, Input::kBits, 12 * 128, 4 * 12 * 128, 0, run_kernel<stage_ring_kernel, 32, 2048>},
  };
}

}  // namespace ffpa::cases
