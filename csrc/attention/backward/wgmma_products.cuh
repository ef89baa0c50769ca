// Computes dQ = scale · dS K, dK = scale · dSᵀ Q and dV = Pᵀ dO of a chunk on wgmma, in tiles of 256 rows × kColumns
// columns. A tile of up to 192 columns belongs to one block; a wider one to two blocks of a cluster, with half of the
// rows each, which share the boxes of K, Q or dO. Each warpgroup has half of its block's rows. P and dS come from the
// workspace as they were written: dQ reads boxes of dS by rows, dK and dV read boxes of dS and P as transposes. Sums of
// dK and dV run over all rows of all query heads that share a key/value head, in a fixed order; nobody else adds to a
// result, so bits do not change from run to run.
//
// Rows that must not count (those behind the end of a packed sequence, and those that see no key) have zeros in P and
// dS, and become zeros in shared memory where they are the other operand: 0 · NaN would be NaN.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/backward/gradient_writer.cuh"
#include "attention/backward/kept_gradient_tile.cuh"
#include "attention/backward/tile_queue.cuh"
#include "attention/backward/tiles.cuh"
#include "attention/params/backward_params.h"
#include "attention/rows/item_queue.cuh"
#include "attention/tensor_maps.cuh"
#include "base/compiler.h"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/box_ring.cuh"

namespace ffpa {

// Fields has Dtype; kColumns of a tile; kOfQ, true for dQ and false for dK and dV. (Both in one kernel are two
// pipelines of products, which ptxas then serialises.)
template <class Fields>
struct BackwardWgmmaProductsConfig : Fields {
  using Params = BackwardParams;
  static constexpr int kClusterBlocks = Fields::kColumns > 192 ? 2 : 1;
  static constexpr int kBlockRows = kRowTile / kClusterBlocks;
  using Tiles = ProductTiles<Fields::kOfQ, kRowTile, Fields::kColumns>;
  using Ring = tile::BoxRing<kBlockRows / tile::kBox, ceil_div(Fields::kColumns, tile::kBox), 4, kClusterBlocks>;
  static constexpr int kThreads = tile::kCoreThreads;
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;  // registers of a thread

  // Shared memory holds slots of the ring; for each warp, rows on their way, where there is room; barriers; tiles; and
  // numbers of tiles that block 0 of a cluster passes to block 1.
  using Kept = KeptGradientTile<std::conditional_t<Fields::kOfQ, KeySource, RowSource>>;
  using Queue = TileQueue<Kept>;
  using Items = ItemQueue<kClusterBlocks>;
  using Stores = tile::RowStores<2>;
  static constexpr bool kStoresBoxes = Fields::kColumns > 192;
  static constexpr uint32_t kBarriersAt = Ring::kBytes + (kStoresBoxes ? tile::kConsumerWarps * Stores::kBytes : 0);
  static constexpr uint32_t kItemsAt = kBarriersAt + Ring::kBarrierBytes + Queue::kBytes;
  static constexpr uint32_t kSmemBytes = kItemsAt + Items::kBytes;

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape = persistent_shape(Tiles(params).count(), params.attention.resident_blocks, kThreads, kSmemBytes,
                                         nullptr, kClusterBlocks);
    shape.starts_early = !Fields::kOfQ && params.gives_q;
    return shape;
  }

  struct Arguments {
    Params params;
    ptx::TensorMap q, k, grad_out, p, ds;
    ptx::TensorMap dq, dk, dv;  // maps of 16-bit gradients

    LaunchStatus fill(const Params& of_call) {
      params = of_call;
      const AttentionParams& a = params.attention;
      const LaunchStatus statuses[] = {map_queries(q, a, a.q, a.d_qk), map_keys(k, a, a.k, a.d_qk),
                                       map_queries(grad_out, a, params.grad_out, a.d_v),
                                       map_matrix(p, params.p, params.workspace_columns(), params.workspace_rows()),
                                       map_matrix(ds, params.ds, params.workspace_columns(), params.workspace_rows())};
      if (const LaunchStatus status = first_failure(statuses); !status.ok() || params.float_gradients) return status;
      const auto view = [](const GradientView& x) {
        return TensorView{static_cast<uint16_t*>(x.data), x.batch_stride, x.head_stride, x.row_stride};
      };
      const LaunchStatus of_gradients[] = {map_queries(dq, a, view(params.dq), a.d_qk, tile::kStoredRows),
                                           map_keys(dk, a, view(params.dk), a.d_qk, tile::kStoredRows),
                                           map_keys(dv, a, view(params.dv), a.d_v, tile::kStoredRows)};
      return first_failure(of_gradients);
    }
  };
};

template <class Config>
class BackwardWgmmaProducts {
  using Element = typename Config::Dtype;
  using Tiles = typename Config::Tiles;
  using Ring = typename Config::Ring;
  using Arguments = typename Config::Arguments;
  using Kept = typename Config::Kept;
  using Source = typename Kept::Source;
  static constexpr int kRows = Config::kBlockRows;
  static constexpr int kColumns = Config::kColumns;
  static constexpr int kBlocks = Ring::kBoxesA / tile::kConsumerGroups;  // blocks of 64 rows in a warpgroup
  static constexpr int kStepsToFindNext = 16;
  using Sums = float[kBlocks][kColumns / 2];

 public:
  FFPA_DEVICE explicit BackwardWgmmaProducts(const Arguments& arguments)
      : arguments_(arguments),
        params_(arguments.params),
        attention_(arguments.params.attention),
        lane_(ptx::lane_id()),
        warp_(ptx::shfl_idx(ptx::thread_x() / 32, 0)),  // the shuffle tells the compiler: one value for the warp
        rank_(Ring::kClusterBlocks == 1 ? 0 : ptx::cluster_rank()),
        ring_{ptx::dynamic_smem(), ptx::dynamic_smem() + Config::kBarriersAt},
        queue_(ring_.barriers_smem + Ring::kBarrierBytes) {}

  // As blocks of dQ end, those of dK and dV take their places. They need not wait: P and dS were there before dQ began.
  // But they end after it, as whatever comes next waits for them alone.
  FFPA_DEVICE void run() {
    if constexpr (Config::kOfQ) ptx::let_next_kernel_start();
    if (ptx::thread_x() == 0) {
      queue_.init(1 + tile::kConsumerWarps);
      if constexpr (Config::kClusterBlocks > 1) item_queue().init(1);
      ring_.init();
    }
    ring_.meet();
    tile::run_roles<Config, 2>(
        warp_, [&](int warp) { warp == 0 ? bring() : find(); },
        [&](int group, int group_warp) { consume(group, group_warp); });
    if constexpr (Ring::kClusterBlocks > 1) ring_.meet();
    if constexpr (!Config::kOfQ) ptx::wait_for_earlier_kernels();
  }

 private:
  // ---- the warp that finds tiles ----

  FFPA_DEVICE typename Config::Items item_queue() const {
    return typename Config::Items(ptx::dynamic_smem() + Config::kItemsAt);
  }

  FFPA_DEVICE void find() {
    typename Config::Items items = item_queue();
    TileRounds<Ring::kClusterBlocks> rounds;
    Tiles tiles(params_);
    tiles.narrow();
    const int count = tiles.count();
    int item = rounds.next(), steps = 0;
    FFPA_NO_UNROLL
    for (; item < count; item = attention_.is_packed() ? take(items, count, steps) : rounds.next()) {
      const ProductTile tile = tiles.get(item);
      if (!has_part_of<Tiles>(params_, tile)) continue;
      steps = steps_of_product<Tiles>(params_, tile, tile::kBox);
      const GradientTile gradient = gradient_tile<Tiles>(params_, tile);
      const Source source = Source::template of<Tiles>(params_, tile);
      if (lane_ == 0) Kept::put(queue_, gradient, steps, source);
    }
    if (lane_ == 0) queue_.put_end();
  }

  // Takes the tile that comes next, as nobody knows how long those of packed sequences are; or, in block 1 of a
  // cluster, the one that block 0 has taken. The kernel of P and dS has cleared the counter. Who takes many tiles ahead
  // keeps them from blocks that are free; so if the last one is long enough to find the next meanwhile, that one has to
  // be in work.
  FFPA_DEVICE int take(typename Config::Items& items, int count, int steps) const {
    if (rank_ == 0 && lane_ == 0 && steps >= kStepsToFindNext) queue_.wait_for_all_but(1);
    if constexpr (Ring::kClusterBlocks == 1) {
      return items.next(params_.taken(Config::kOfQ), count, lane_);
    } else {
      if (rank_ == 0) return items.take(params_.taken(Config::kOfQ), count, lane_);
      items.expect(lane_);
      return items.get(lane_);
    }
  }

  // ---- the warp that brings their boxes ----

  FFPA_DEVICE void bring() {
    tile::BoxProducer<Ring> producer(ring_, lane_);
    FFPA_NO_UNROLL
    for (;; queue_.release(lane_)) {
      const Kept kept = queue_.get();
      if (!kept.exists()) break;
      if (kept.steps() == 0) producer.bring_zeros();
      if constexpr (Config::kOfQ) {
        bring_keys(producer, kept);
      } else {
        const RowSource source = kept.source();
        FFPA_NO_UNROLL
        for (int head = source.heads.first; head < source.heads.end; ++head) bring_rows(producer, kept, source, head);
      }
    }
  }

  // Brings the chunk's keys that the rows of a tile of dQ see.
  FFPA_DEVICE void bring_keys(tile::BoxProducer<Ring>& producer, const Kept& kept) const {
    const KeySource source = kept.source();
    const int column_0 = kept.column();
    const int row = int(workspace_row(params_, kept.entry(), kept.tile())) + rank_ * kRows;
    FFPA_NO_UNROLL
    for (int key = source.keys.begin; key < source.keys.end; key += tile::kBox) {
      producer.bring_live_rows(
          live_box_rows(source.n_k - key, attention_.is_packed()), [&](uint32_t boxes_smem, uint32_t barrier) {
            for (int box = 0; box < Ring::kBoxesA; ++box, boxes_smem += tile::kBoxBytes) {
              const int first_key = source.first_keys.at(source.first_row + rank_ * kRows + box * tile::kBox);
              ptx::tma_load_2d(boxes_smem, &arguments_.ds, barrier, key - first_key, row + box * tile::kBox);
            }
            load_columns(boxes_smem, arguments_.k, barrier, source.k, column_0, key);
          });
    }
  }

  // Brings the rows of query head `head` (of the group), for dK or dV.
  FFPA_DEVICE void bring_rows(tile::BoxProducer<Ring>& producer, const Kept& kept, const RowSource& source,
                              int head) const {
    const bool of_v = kept.product() == Product::kDv;
    const ptx::TensorMap &a = of_v ? arguments_.p : arguments_.ds, &b = of_v ? arguments_.grad_out : arguments_.q;
    const MapPlace q = {source.q.row, source.q.head + head, source.q.batch};
    const int column_0 = kept.column();
    const int row_0 = int(workspace_row(params_, kept.entry(), source.first_tile_of(head)));
    const int key = source.first_key + rank_ * kRows;
    const auto load = [&](int row) {
      return [&, row](uint32_t boxes_smem, uint32_t barrier) {
        const int column = key - source.first_keys.at(row);  // column of P or dS
        for (int box = 0; box < Ring::kBoxesA; ++box, boxes_smem += tile::kBoxBytes) {
          ptx::tma_load_2d(boxes_smem, &a, barrier, column + box * tile::kBox, row_0 + row);
        }
        load_columns(boxes_smem, b, barrier, q, column_0, row);
      };
    };
    const Run run = source.run_over_head(params_, head);
    const uint64_t* live = source.live_rows_of(params_, head) + run.begin / kLiveRows;
    const int steps = run.steps(tile::kBox);
    if (all_live(live, steps)) {
      FFPA_NO_UNROLL
      for (int step = 0; step < steps; ++step) producer.bring(load(run.begin + step * tile::kBox));
      return;
    }
    FFPA_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      uint32_t word[2];
      ptx::ld_global_8(word, live + step);
      producer.bring_live_rows(word[0] | uint64_t(word[1]) << 32, load(run.begin + step * tile::kBox));
    }
  }

  // Says whether all rows count, which is almost always so; asking at every step would leave the ring empty.
  FFPA_DEVICE bool all_live(const uint64_t* live, int words) const {
    uint32_t all = ~0u;
    FFPA_NO_UNROLL
    for (int i = lane_; i < words; i += 32) {
      uint32_t word[2];
      ptx::ld_global_8(word, live + i);
      all &= word[0] & word[1];
    }
    return ptx::vote_all(all == ~0u);
  }

  // Loads the boxes of B that this block brings for its cluster.
  FFPA_DEVICE void load_columns(uint32_t boxes_smem, const ptx::TensorMap& map, uint32_t barrier, const MapPlace& place,
                                int column, int row) const {
    for (int i = 0; i < Ring::kOwnBoxesB; ++i) {
      const int box = rank_ * Ring::kOwnBoxesB + i;
      load_box<Ring::kClusterBlocks>(boxes_smem + box * tile::kBoxBytes, map, barrier, place, column + box * tile::kBox,
                                     row);
    }
  }

  // ---- the warpgroups that multiply ----

  FFPA_DEVICE void consume(int group, int group_warp) {
    tile::BoxConsumer<Ring> consumer(ring_, group, lane_);
    const int warp = group * tile::kGroupWarps + group_warp;
    typename Config::Stores stores(ring_.slots_smem + Ring::kBytes + warp * Config::Stores::kBytes, lane_);
    constexpr auto kMajorA = Config::kOfQ ? tile::Major::kK : tile::Major::kMN;
    FFPA_NO_UNROLL
    for (;; queue_.release(lane_)) {
      const Kept kept = queue_.get();
      if (!kept.exists()) break;
      Sums sums;
      consumer.template multiply<Element, kColumns, kMajorA, tile::Major::kMN>(sums, max_of(kept.steps(), 1));
      finish(kept.get(), group, sums, stores);
    }
    stores.wait();
  }

  FFPA_DEVICE void finish(const GradientTile& gradient, int group, const Sums& sums,
                          typename Config::Stores& stores) const {
    const ProductTile& tile = gradient.tile;
    FFPA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      const int row = rank_ * kRows + (group * kBlocks + block) * tile::kBox + warp_ % 4 * 16;  // first row of the warp
      // Writes the fragments from `first` on.
      const auto write = [&](auto first) {
        constexpr int kFirst = decltype(first)::value;
        const GradientWriter<Element, Tiles> writer(params_, gradient, lane_);
        writer.template write<kColumns / 8 - kFirst>(row, kFirst, [&](int n, float (&values)[4]) {
          FFPA_UNROLL
          for (int e = 0; e < 4; ++e) values[e] = sums[block][4 * (kFirst + n) + e];
        });
      };
      constexpr int kWhole = Config::kStoresBoxes ? kColumns / tile::kBox * (tile::kBox / 8) : 0;  // whole boxes
      if (kWhole > 0 && gradient.are_results(params_, row)) {
        const ptx::TensorMap& map = Config::kOfQ                   ? arguments_.dq
                                    : tile.product == Product::kDv ? arguments_.dv
                                                                   : arguments_.dk;
        const float factor = gradient.scale<Element>(params_), factors[2] = {factor, factor};
        const MapPlace& at = gradient.place;
        store_rows<Element>(stores, sums[block], factors, [&](uint32_t rows_smem, int column) {
          ptx::tma_store_4d(&map, rows_smem, tile.column + column, at.row + row, at.head, at.batch);
        });
        if constexpr (kWhole < kColumns / 8) write(std::integral_constant<int, kWhole>());
      } else {
        write(std::integral_constant<int, 0>());
      }
    }
  }

  const Arguments& arguments_;
  const BackwardParams& params_;
  const AttentionParams& attention_;
  int lane_, warp_;
  int rank_;  // rank of the block in its cluster
  Ring ring_;
  typename Config::Queue queue_;
};

template <class Config>
FFPA_KERNEL(Config::kThreads, 1)
void backward_wgmma_products(FFPA_GRID_CONSTANT const typename Config::Arguments arguments) {
  BackwardWgmmaProducts<Config>(arguments).run();
}

}  // namespace ffpa
