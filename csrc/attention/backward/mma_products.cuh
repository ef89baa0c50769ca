// Computes dQ = scale · dS K, dK = scale · dSᵀ Q and dV = Pᵀ dO of a chunk on mma.sync, in tiles of 128 rows × kColumns
// columns, of which a warp has 64 rows × a quarter of the columns. P and dS come from the workspace as they were
// written: dQ reads them by rows, dK and dV as transposes. Sums of dK and dV run over all rows of all query heads that
// share a key/value head, in a fixed order; nobody else adds to a result, so bits do not change from run to run.
//
// Rows that must not count (those behind the end of a packed sequence, and those that see no key) have zeros in P and
// dS, and come as zeros where they are the other operand: 0 · NaN would be NaN.
#pragma once

#include <cstdint>

#include "attention/backward/gradient_writer.cuh"
#include "attention/backward/tiles.cuh"
#include "attention/params/backward_params.h"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/mma_core.cuh"
#include "tile/tile_copy.cuh"

namespace ffpa {

// Fields has Dtype; kColumns of a tile; kOfQ, true for dQ and false for dK and dV.
template <class Fields>
struct BackwardMmaProductsConfig : Fields {
  using Params = BackwardParams;
  using Core = tile::MmaCore<typename Fields::Dtype, Fields::kColumns,
                             Fields::kOfQ ? tile::Lines::kAlong : tile::Lines::kAcross, tile::Lines::kAcross>;
  using Tiles = ProductTiles<Fields::kOfQ, Core::kRows, Fields::kColumns>;
  static constexpr int kThreads = Core::kThreads;
  static_assert(Core::kSmemBytes <= tile::kSmemOfEveryGpu, "a block fits every GPU from sm_80 on");

  static LaunchShape launch_shape(const Params& params) {
    return persistent_shape(Tiles(params).count(), params.attention.resident_blocks, kThreads, Core::kSmemBytes);
  }
};

template <class Config>
class BackwardMmaProducts {
  using Element = typename Config::Dtype;
  using Tiles = typename Config::Tiles;
  using Core = typename Config::Core;
  static constexpr bool kOfQ = Config::kOfQ;
  static_assert(Core::kStep == 32 && kLiveRows % 32 == 0, "a step has 32 bits of live_rows");

 public:
  FFPA_DEVICE explicit BackwardMmaProducts(const BackwardParams& params)
      : params_(params), attention_(params.attention) {}

  // While a tile is written, the first steps of the next one are on their way.
  FFPA_DEVICE void run() {
    ProductTileSequence<Tiles> tiles(params_);
    ProductTile tile;
    bool more = tiles.next(tile);
    if (more) begin(tile);
    FFPA_NO_UNROLL
    while (more) {
      typename Core::Sums sums;
      core_.multiply(ring_, sums, steps_of_product<Tiles>(params_, tile, Core::kStep), [&] { bring_step(tile); });
      const ProductTile done = tile;
      more = tiles.next(tile);
      if (more) begin(tile);
      finish(done, sums);
    }
  }

 private:
  // ---- steps on their way into shared memory ----

  FFPA_DEVICE void begin(const ProductTile& tile) {
    if (kOfQ) {
      begin_keys(tile);
    } else {
      next_head_ = heads_of_chunk(params_, tile.batch).first;
      steps_left_ = 0;
    }
    FFPA_NO_UNROLL
    for (int step = 0; step < ring_.ahead(); ++step) bring_step(tile);
  }

  // Begins the run over the chunk's keys that the rows of a tile of dQ see.
  FFPA_DEVICE void begin_keys(const ProductTile& tile) {
    const RowTile rows = rows_of_product<Tiles>(params_, tile);
    const Run run = run_over_chunk(params_, rows, Core::kStep);
    const int64_t row = workspace_row(params_, tile.entry, 0) + tile.tile * Tiles::kRows;
    key_ = run.begin;
    row_ = rows.first;
    first_keys_ = FirstKeys::of(params_, rows.entry, rows.batch());
    begin_run(run, params_.ds + row * params_.workspace_columns(), attention_.k, rows.batch(),
              head_kv_of(params_, tile.entry), rows.entry.k, tile.column, attention_.d_qk);
  }

  // Begins the run over the rows of the next query head that has any, for dK or dV; steps_left_ stays 0 if none has.
  FFPA_DEVICE void begin_rows(const ProductTile& tile) {
    const int end_head = heads_of_chunk(params_, tile.batch).end;
    if (next_head_ == end_head) return;
    const BatchEntry entry = batch_entry(attention_, tile.batch);
    Run run = {0, 0};
    FFPA_NO_UNROLL
    while (next_head_ < end_head && run.begin == run.end) {
      run = run_over_head<Tiles>(params_, tile, entry, next_head_++, Core::kStep);
    }
    if (run.begin == run.end) return;
    const bool of_v = tile.product == Product::kDv;
    const int head_of_group = next_head_ - 1, head = head_kv_of(params_, tile.entry) * attention_.group + head_of_group;
    const int64_t row = workspace_row_of_head(params_, tile, head_of_group) + run.begin;
    key_ = first_key_of_product<Tiles>(params_, tile);
    row_ = run.begin;
    first_keys_ = FirstKeys::of(params_, entry, tile.batch);
    begin_run(run, (of_v ? params_.p : params_.ds) + row * params_.workspace_columns(),
              of_v ? params_.grad_out : attention_.q, tile.batch, head, entry.q, tile.column, tile.columns_of_all);
    live_gmem_ = reinterpret_cast<const uint32_t*>(live_rows_of_head(params_, tile.batch, head)) + run.begin / 32;
    live_ = ptx::ld_global_4(live_gmem_);
  }

  // Begins a run whose A has its first row at `a` in the workspace, and whose B is a head of `x`.
  FFPA_DEVICE void begin_run(const Run& run, const uint16_t* a, const TensorView& x, int batch, int head,
                             const RowRange& range, int column, int columns_of_all) {
    steps_left_ = run.steps(Core::kStep);
    a_ = {a, params_.workspace_columns(), Core::kRows, Core::kStep};
    b_ = window_of(x, batch, head, range, run.begin, column, columns_of_all);
  }

  FFPA_DEVICE void bring_step(const ProductTile& tile) {
    if (steps_left_ == 0) {
      if (!kOfQ) begin_rows(tile);
      if (steps_left_ == 0) return;
    }
    const int column = key_ - first_keys_.at(row_), columns = params_.workspace_columns();
    const tile::GmemWindow a = {a_.origin + column, a_.row_stride, a_.rows, a_.columns};
    core_.bring(
        ring_, a, [=](int, int chunk) { return uint32_t(column + chunk * tile::kChunkElements) < uint32_t(columns); },
        b_,
        [&](int row, int chunk) {
          return row < b_.rows && chunk * tile::kChunkElements < b_.columns && (kOfQ || (live_ >> row & 1));
        });
    --steps_left_;
    if (kOfQ) {
      key_ += Core::kStep;
    } else {
      row_ += Core::kStep;
      a_.origin += Core::kStep * a_.row_stride;
    }
    b_.origin += Core::kStep * b_.row_stride;
    b_.rows -= Core::kStep;
    if (!kOfQ && steps_left_ > 0) live_ = ptx::ld_global_4(++live_gmem_);
  }

  FFPA_DEVICE void finish(const ProductTile& tile, const typename Core::Sums& sums) const {
    const GradientWriter<Element, Tiles> writer(params_, gradient_tile<Tiles>(params_, tile), core_.lane());
    FFPA_UNROLL
    for (int m = 0; m < Core::kM; ++m) {
      writer.template write<Core::kN>(core_.warp_row() + m * 16, core_.warp_column() / 8,
                                      [&](int n, float (&values)[4]) { sums[m][n].get(values); });
    }
  }

  const BackwardParams& params_;
  const AttentionParams& attention_;
  Core core_;
  typename Core::Ring ring_ = Core::make_ring();
  tile::GmemWindow a_, b_;  // rest of the run that is being brought; A from column 0 of the workspace on
  int steps_left_, next_head_;
  int row_, key_;  // first ones of the next step
  FirstKeys first_keys_;
  const uint32_t* live_gmem_;
  uint32_t live_;  // live_rows bits of the next step
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void backward_mma_products(FFPA_GRID_CONSTANT const BackwardParams params) {
  BackwardMmaProducts<Config>(params).run();
}

}  // namespace ffpa
