// The shapes of a forward whose O two blocks of a cluster hold: tiles, shared memory, launch.
#pragma once

#include <cstdint>

#include "attention/forward/wgmma_steps.cuh"
#include "attention/params/attention_params.h"
#include "attention/rows/item_queue.cuh"
#include "attention/rows/row_tile.cuh"
#include "attention/rows/row_tiles.cuh"
#include "attention/tensor_maps.cuh"
#include "base/math.h"
#include "ptx/instructions.cuh"
#include "ptx/launch_types.h"
#include "tile/box_ring.cuh"

namespace ffpa {

// Fields has Dtype; kColumns, the most columns of Q, K, V and O.
template <class Fields>
struct ForwardWgmmaPairConfig : Fields {
  using Params = AttentionParams;
  static constexpr int kBlocks = 2;  // blocks of a cluster
  static constexpr int kRows = tile::kConsumerGroups * tile::kBox;
  static constexpr int kBlockKeys = tile::kBox, kKeys = kBlocks * kBlockKeys;
  static constexpr int kOwnColumns = Fields::kColumns / kBlocks;  // columns of O in a block
  static constexpr int kBoxes = Fields::kColumns / tile::kBox;    // boxes of a row of Q and K
  // A slot with K has kKeyBoxes boxes, and a tile of K takes kKeyParts slots. A slot with V has kValueBoxes boxes of
  // kValueRows keys, and the keys of a block take kValueParts slots.
  static constexpr int kKeyBoxes = 2, kKeyParts = ceil_div(kBoxes, kKeyBoxes);
  static constexpr int kValueRows = 32, kValueBoxes = ceil_div(kOwnColumns, tile::kBox);
  static constexpr int kValueParts = kBlockKeys / kValueRows;
  static constexpr uint32_t kValueBoxBytes = kValueRows * tile::kBoxRowBytes;
  static_assert(kOwnColumns % 32 == 0 && kOwnColumns <= 256, "an instruction has all of a block's columns");
  static constexpr int kThreads = tile::kCoreThreads;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // registers of a thread

  // Shared memory holds slots of the ring, as many as fit; Q; P for the other block, or O on its way; P from the other
  // block; notes for it and from it; barriers of the ring, of Q and of messages; for each warp, the rows in work; the
  // row tiles.
  static constexpr int kConsumerWarps = tile::kConsumerGroups * tile::kGroupWarps;
  static constexpr int kReadingWarps = kBlocks * (kConsumerWarps + 1) - 1;  // readers of row tiles that one warp takes
  using Stores = tile::RowStores<1>;
  using Queries = QueryBoxes<kBoxes>;
  using Items = ItemQueue<kBlocks>;
  static constexpr uint32_t kWarpPBytes = 16 * tile::kBoxRowBytes, kPBytes = kConsumerWarps * kWarpPBytes;
  static_assert(Stores::kBytes == kWarpPBytes, "O leaves from where P did");
  static constexpr uint32_t kWarpNoteBytes = 16 * 4, kNoteBytes = kConsumerWarps * kWarpNoteBytes;
  static constexpr uint32_t kMessageBarrierBytes = 2 * tile::kConsumerGroups * 8;
  static constexpr uint32_t kOtherBytes = Queries::kBytes + 2 * kPBytes + 2 * kNoteBytes + Queries::kBarrierBytes +
                                          kMessageBarrierBytes + (1 + kConsumerWarps) * KeptRows::kBytes +
                                          Items::kBytes;
  static constexpr uint32_t kMostBytes = 227 * 1024, kRingSlotBytes = kKeyBoxes * tile::kBoxBytes;
  static constexpr int kSlots = min_of(int((kMostBytes - kOtherBytes - 16) / (kRingSlotBytes + 3 * 8)), 8);
  static_assert(kValueBoxes * kValueBoxBytes <= kRingSlotBytes, "a slot holds a part of V, too");
  using Ring = tile::BoxRing<0, kKeyBoxes, kSlots>;

  static constexpr uint32_t kQueryAt = Ring::kBytes;
  static constexpr uint32_t kSentPAt = kQueryAt + Queries::kBytes, kPAt = kSentPAt + kPBytes;
  static constexpr uint32_t kSentNotesAt = kPAt + kPBytes, kNotesAt = kSentNotesAt + kNoteBytes;
  static constexpr uint32_t kBarriersAt = kNotesAt + kNoteBytes;
  static constexpr uint32_t kQueryBarriersAt = kBarriersAt + Ring::kBarrierBytes;
  static constexpr uint32_t kMessageBarriersAt = kQueryBarriersAt + Queries::kBarrierBytes;
  static constexpr uint32_t kKeptAt = round_up(kMessageBarriersAt + kMessageBarrierBytes, 16u);
  static constexpr uint32_t kItemsAt = kKeptAt + (1 + kConsumerWarps) * KeptRows::kBytes;
  static constexpr uint32_t kSmemBytes = kItemsAt + Items::kBytes;
  static_assert(kSmemBytes <= kMostBytes, "what a block has");

  static LaunchShape launch_shape(const Params& params) {
    LaunchShape shape;
    shape.cluster.x = kBlocks;
    const int clusters = min_of(RowTiles<kRows>(params).count(), max_of(params.resident_blocks / kBlocks, 1));
    shape.grid.x = uint32_t(kBlocks * clusters);
    shape.threads = kThreads;
    shape.smem_bytes = kSmemBytes;
    shape.counter = reinterpret_cast<uint32_t*>(params.scratch);
    return shape;
  }

  struct Arguments {
    Params params;
    RowTiles<kRows> row_tiles;
    ptx::TensorMap q, k, v, out;
  };

  static LaunchStatus arguments(const Params& params, Arguments& arguments) {
    arguments.params = params;
    arguments.row_tiles = RowTiles<kRows>(params);
    const LaunchStatus statuses[] = {map_queries(arguments.q, params, params.q, params.d_qk),
                                     map_keys(arguments.k, params, params.k, params.d_qk),
                                     map_keys(arguments.v, params, params.v, params.d_v, kValueRows),
                                     map_queries(arguments.out, params, params.out, params.d_v, Stores::kRows)};
    return first_failure(statuses);
  }
};

}  // namespace ffpa
