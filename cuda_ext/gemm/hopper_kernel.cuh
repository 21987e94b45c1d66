// The kernel: a persistent grid of clusters of two blocks. In a block one warp feeds tiles to shared memory through
// TMA, and one to three warpgroups multiply them.
//
// A block computes kBM × kBN of d, some subtiles of 64 rows in each warpgroup, in steps of 128 along k. The two blocks
// of a cluster lie side by side and need the same rows of a: each loads half of these and sends it to both. Otherwise a
// step of 256 × 128 × 128 would need 48 KB, 9 TB/s at full rate, and the L2 cache yields about 6.
//
// Sums in the tensor cores keep about 14 bits. Modes other than kFast start a new sum in `partial` every 128 values of
// k, and add it, scaled, to `total` in float32. While one warpgroup adds, the others keep the tensor cores busy, as
// long as everything between two products of a warpgroup takes less time than those of the others: the code from
// `WgmmaWait` to the next `Wgmma` is what counts. So whether the next step's tiles are there is asked before the last
// sums of a step are added. Scales of blocks come with the tiles they belong to.
//
// Rows may come in groups whose sizes are on the device (hopper_groups.cuh), and then operands may be bfloat16: 128
// bytes of k are 64 values, and the instructions, registers and shared memory of a step are the same.
//
// The products of several pairs of operands may be summed, as one product of the steps of all: those of the next pair
// follow, with maps of their own. What is left of a step at the end of k is zeros, so that a pair begins with a whole
// one.
//
// FLOPs 2mnk; bytes mk + nk + mn · size of d, once each, as long as the tiles of concurrent blocks share their rows in
// L2: blocks walk the results, one below the other, in bands of kBand cluster tiles. The floor is that of the tensor
// cores, 4096 products a cycle and multiprocessor.
#pragma once

#include <type_traits>

#include "gemm/hopper_config.cuh"
#include "gemm/hopper_epilogue.cuh"
#include "gemm/hopper_groups.cuh"
#include "gemm/hopper_ptx.cuh"
#include "gemm/hopper_wgmma.cuh"

namespace te::gemm::hopper {

// Where the tiles of a block lie, in the order in which it computes them, without groups. It remembers one number:
// registers are dear.
template <typename C>
class Tiles {
 public:
  __device__ Tiles() : next_(blockIdx.x / 2) {}

  // Tiles of rows are counted through all products of a batch: see `WorkTileOf`.
  __device__ __forceinline__ bool Next(const Problem& p, Tile* tile) {
    const int rows = static_cast<int>(p.batch.count) * CeilDiv(p.m, C::kClusterM);
    const int columns = CeilDiv(p.n, C::kClusterN);
    if (next_ >= rows * columns) return false;
    const int rank = ClusterRank();
    const int band = next_ / (C::kBand * columns);
    const int rows_of_band = min(C::kBand, rows - band * C::kBand);
    const int within = next_ - band * C::kBand * columns;
    tile->row_tile = band * C::kBand + within % rows_of_band;
    tile->n0 = within / rows_of_band * C::kClusterN + rank * C::kBN;
    next_ += gridDim.x / 2;
    return true;
  }

  static __device__ __forceinline__ WorkTile WorkTileOf(const Problem& p, const Tile& tile) {
    const int rows = static_cast<int>(p.m), steps = CeilDiv(p.k, C::kBK);
    // Dividing costs up to 2% (docs/measurements.md).
    if (p.batch.count == 1) return {0, tile.row_tile * C::kClusterM, 0, rows, 0, steps};
    const int tiles = CeilDiv(p.m, C::kClusterM), product = tile.row_tile / tiles;
    return {product, (tile.row_tile - product * tiles) * C::kClusterM, 0, rows, 0, steps};
  }

 private:
  int next_;
};

// Loads a block's share of 128 bytes of k of a's rows, and sends it to both blocks of the cluster.
template <typename C>
__device__ __forceinline__ void LoadA(const CUtensorMap* map, uint32_t to, int k, int row, int product, uint32_t rank,
                                      uint32_t barrier) {
  const int half = rank * C::kBoxA;  // in lines
  if constexpr (C::kASummedFirst) {
#pragma unroll
    for (int rows = 0; rows < C::kBM / 64; ++rows) {
      LoadBoxMulticast(to + rows * C::kBytes64Rows + half * C::kLine, map, row + 64 * rows, k + half, product, barrier,
                       3);
    }
  } else {
    LoadBoxMulticast(to + half * C::kLine, map, k, row + half, product, barrier, 3);
  }
}

template <typename C>
__device__ __forceinline__ void LoadB(const CUtensorMap* map, uint32_t to, int k, int row, int product,
                                      uint32_t barrier) {
  if constexpr (C::kBSummedFirst) {
#pragma unroll
    for (int rows = 0; rows < C::kBN / 64; ++rows) {
      LoadBox(to + rows * C::kBytes64Rows, map, row + 64 * rows, k, product, barrier);
    }
  } else {
    LoadBox(to, map, k, row, product, barrier);
  }
}

template <typename C>
using ArgumentsOf = std::conditional_t<C::kPairs == 1, Arguments, SumArguments<C::kPairs>>;

// The steps of a work tile up to the end of a pair.
template <typename C>
__device__ __forceinline__ int EndOf(const ArgumentsOf<C>& arguments, const WorkTile& work_tile, int pair) {
  if constexpr (C::kPairs == 1) {
    return work_tile.steps;
  } else {
    return work_tile.steps == 0 ? 0 : arguments.ends[pair];
  }
}

// The pair that a step belongs to, and the first step of it.
template <typename C>
__device__ __forceinline__ int PairOf(const ArgumentsOf<C>& arguments, int step, int* first) {
  int pair = 0;
  *first = 0;
  if constexpr (C::kPairs > 1) {
#pragma unroll
    for (int i = 0; i + 1 < C::kPairs; ++i) {
      if (step >= arguments.ends[i]) pair = i + 1, *first = arguments.ends[i];
    }
  }
  return pair;
}

// Where the scales of blocks begin of the columns from n0 on of b of a product, in what TMA knows of them. `all_steps`
// are those of the first pair.
template <typename C>
__device__ __forceinline__ int FirstColumnScale(const ArgumentsOf<C>& arguments, int product, int n0, int all_steps,
                                                int pair = 0) {
  int first = product * static_cast<int>(arguments.problem.batch.b_scales_stride), steps = all_steps;
  if constexpr (C::kPairs > 1) {
    if (pair > 0) {
      steps = arguments.ends[pair] - arguments.ends[pair - 1];
      return first + arguments.more[pair - 1].b_scales_before + n0 / C::kBN * steps;
    }
  }
  if (C::kGrouping != Grouping::kNone || C::kPairs > 1) first += arguments.groups.b_scales_before;
  return first + n0 / C::kBN * steps;
}

// The tensor maps of a pair of operands.
struct OperandMaps {
  const CUtensorMap *a, *b, *a_scales, *b_scales;
};

template <typename C>
__device__ __forceinline__ OperandMaps OperandsOf(const ArgumentsOf<C>& arguments, int pair) {
  if constexpr (C::kPairs > 1) {
    if (pair > 0) {
      const auto& of_pair = arguments.more[pair - 1];
      return {&of_pair.a, &of_pair.b, &of_pair.a_scales, &of_pair.b_scales};
    }
  }
  return {&arguments.a, &arguments.b, &arguments.a_scales, &arguments.b_scales};
}

// Sets sums to zero by a product of zeros, which settles where they lie: the sums of a product start at an even
// register, and each of these changes places with its neighbour. So a sum never lies in the same of two register banks
// as the result that is added to it, which the compiler leaves to chance: 4% on an H200 (docs/measurements.md).
template <typename C>
__device__ __forceinline__ void ClearOutOfStep(float (&sums)[C::kBN / 2], uint64_t zeros) {
  float swapped[C::kBN / 2] = {};
  Pin(swapped);
  WgmmaFence();
  Wgmma<C::kFormats>(swapped, zeros, zeros, false);
  WgmmaCommit();
  Pin(swapped);
  WgmmaWait<0>();
#pragma unroll
  for (int i = 0; i < C::kBN / 2; ++i) sums[i] = swapped[i ^ 1];
}

template <typename C>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(C::kThreads, 1)
    Multiply(const __grid_constant__ ArgumentsOf<C> arguments) {
  constexpr bool kIsGrouped = C::kGrouping != Grouping::kNone;
  extern __shared__ uint8_t shared[];
  const Problem& p = arguments.problem;
  const uint32_t rank = ClusterRank();
  const int all_steps = CeilDiv(p.k, C::kBK), rows = static_cast<int>(p.m);

  // Zeros first: compute-sanitizer takes the product of them, all of whose rows are the same eight, for one of a whole
  // tile, which must lie in shared memory.
  const uint32_t zeros = (SharedAddress(shared) + 1023) & ~1023u;
  const uint32_t tiles_a = zeros + C::kBytesZeros;
  const uint32_t tiles_b = tiles_a + C::kStages * C::kBytesA;
  const uint32_t staging = tiles_b + C::kStages * C::kBytesB;
  const uint32_t scales = staging + C::kBytesStaging;
  const uint32_t full = scales + C::kStages * C::kBytesScales;
  const uint32_t empty = full + 8 * C::kStages;
  TileSlots<C> slots(empty + 8 * C::kStages);
  const RangeTable<C> table(arguments.groups, empty + 8 * C::kStages + C::kSlots * C::kBytesSlot);

  if (threadIdx.x == 0) {
    PrefetchTensorMap(&arguments.a);
    PrefetchTensorMap(&arguments.b);
    PrefetchTensorMap(&arguments.d);
    if constexpr (C::kMode == Mode::kBlock) {
      PrefetchTensorMap(&arguments.a_scales);
      PrefetchTensorMap(&arguments.b_scales);
    }
    if constexpr (C::kPairs > 1) {
      for (const auto& pair : arguments.more) {
        PrefetchTensorMap(&pair.a);
        PrefetchTensorMap(&pair.b);
        if constexpr (C::kMode == Mode::kBlock) {
          PrefetchTensorMap(&pair.a_scales);
          PrefetchTensorMap(&pair.b_scales);
        }
      }
    }
    for (int i = 0; i < C::kStages; ++i) {
      BarrierInit(full + 8 * i, 1);
      BarrierInit(empty + 8 * i, 2 * C::kMathWarps);  // the warps of both blocks read what either one sent
    }
    slots.Init();
    BarrierInitFence();
  }
  if constexpr (C::kBytesZeros > 0) {
    if (threadIdx.x < C::kBytesZeros / 8) StoreShared(zeros + 8 * threadIdx.x, 0.0f, 0.0f);
    AsyncProxyFence();
  }
  if constexpr (kIsGrouped) table.Stage();
  ClusterSync();

  Ring<C::kStages> ring;
  Tile tile;
  if (threadIdx.x >= 32 * C::kMathWarps) {
    if constexpr (C::kMathRegisters > 0) DeallocateRegisters<C::kFeedRegisters>();
    // One thread is the producer. With groups its warp finds the tiles.
    const bool is_producer = threadIdx.x == 32 * C::kMathWarps;
    if (kIsGrouped ? threadIdx.x / 32 == C::kMathWarps : is_producer) {
      auto tiles = [&] {
        if constexpr (kIsGrouped) {
          return GroupedTiles<C>(arguments.groups, table);
        } else {
          return Tiles<C>();
        }
      }();
      while (tiles.Next(p, &tile)) {
        const WorkTile work_tile = tiles.WorkTileOf(p, tile);
        const auto [product, m0, first_row, end_row, first_step, own_steps] = work_tile;
        const int steps = EndOf<C>(arguments, work_tile, C::kPairs - 1);
        const int n0 = tile.n0;
        const int of_a = kIsGrouped ? 0 : product;
        const int of_b = p.batch.b_stride != 0 ? product : 0;
        const int first_row_scale = product * static_cast<int>(p.batch.a_scales_stride) + m0;
        if constexpr (kIsGrouped) {
          if (!is_producer) continue;
          slots.Publish(work_tile, n0);
        }
        for (int i = 0; i < steps; ++i, ring.Advance()) {
          int before_pair;
          const int pair = PairOf<C>(arguments, i, &before_pair);
          const auto [a, b, a_scales, b_scales] = OperandsOf<C>(arguments, pair);
          const int step = first_step + i - before_pair;
          const uint32_t barrier = full + 8 * ring.stage;
          const uint32_t to_a = tiles_a + ring.stage * C::kBytesA, to_b = tiles_b + ring.stage * C::kBytesB;
          BarrierWait(empty + 8 * ring.stage, ring.parity ^ 1);
          BarrierExpect(barrier, C::kBytesLoaded);
          LoadA<C>(a, to_a, step * C::kBK, m0, of_a, rank, barrier);
          LoadB<C>(b, to_b, step * C::kBK, n0, of_b, barrier);
          if constexpr (C::kMode == Mode::kBlock) {
            const uint32_t to = scales + ring.stage * C::kBytesScales;
            LoadBox(to, a_scales, first_row_scale + step * rows, 0, barrier);
            const int first_column_scale = FirstColumnScale<C>(arguments, product, n0, all_steps, pair);
            LoadBox(to + C::kBytesRowScales, b_scales, (first_column_scale + step) & ~3, 0, barrier);
          }
        }
      }
      if constexpr (kIsGrouped) {
        if (is_producer) slots.PublishEnd();
      }
    }
  } else {
    if constexpr (C::kMathRegisters > 0) AllocateRegisters<C::kMathRegisters>();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32;
    const int lane = static_cast<int>(InRegister(threadIdx.x % 32));
    const int group_row = group * (64 * C::kSubtiles);
    const uint32_t warp_staging = staging + warp * C::kStagedBoxes * C::kBytesBox;
    // Two lanes tell the two blocks that the warp is done with a stage.
    const uint32_t empty_of_lane = InRegister(lane < 2 ? PeerAddress(empty, lane) : 0);
    auto release = [&](uint32_t stage) {
      if (empty_of_lane != 0) BarrierArrive(empty_of_lane + 8 * stage);
    };
    // The same in all lanes, which the compiler does not see.
    const uint32_t first_a = __shfl_sync(~0u, TileAddress(tiles_a + group_row * C::kLine), 0);
    const uint32_t first_b = __shfl_sync(~0u, TileAddress(tiles_b), 0);
    // Products of 64 rows of a stage, from row `row` of the warpgroup's, into d.
    auto multiply = [&](float (&d)[C::kBN / 2], int row, bool add) {
      const uint32_t a = first_a + ring.stage * (C::kBytesA >> 4) + row * (C::kLine >> 4);
      const uint32_t b = first_b + ring.stage * (C::kBytesB >> 4);
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // a quarter of the 128 bytes of a line, or of the lines of 64 rows
        const uint32_t a_k = a + k * (C::kASummedFirst ? C::kBytes64Rows / 4 >> 4 : 2);
        const uint32_t b_k = b + k * (C::kBSummedFirst ? C::kBytes64Rows / 4 >> 4 : 2);
        const uint64_t of_a = C::kASummedFirst ? SummedFirst(TileDescriptor(a_k)) : TileDescriptor(a_k);
        const uint64_t of_b = C::kBSummedFirst ? SummedFirst(TileDescriptor(b_k)) : TileDescriptor(b_k);
        Wgmma<C::kFormats, C::kASummedFirst, C::kBSummedFirst>(d, of_a, of_b, add || k > 0);
      }
    };
    // Where sums are grouped, takes what is not of the group out of the tiles of a step.
    auto keep_group = [&](const WorkTile& work_tile, int step) {
      if constexpr (C::kGrouping == Grouping::kSums) {
        if (step != 0 && step != work_tile.steps - 1) return;
        const int k0 = (work_tile.first_step + step) * C::kBK;
        const int range = work_tile.product + 1;
        const int first = table.Row(range) - k0, last = table.Row(range + 1) - k0;
        if (first <= 0 && last >= C::kBK) return;
        KeepSummed<C, C::kASummedFirst, C::kBytesA>(tiles_a + ring.stage * C::kBytesA, first, last, threadIdx.x);
        KeepSummed<C, C::kBSummedFirst, C::kBytesB>(tiles_b + ring.stage * C::kBytesB, first, last, threadIdx.x);
        AsyncProxyFence();
        SyncThreads<32 * C::kMathWarps>();
      }
    };

    // Where a lane's scales lie in the first stage.
    const uint32_t scales_of_rows = InRegister(scales + 4 * (group_row + warp % 4 * 16 + lane / 4));
    const uint32_t scale_of_columns = scales + C::kBytesRowScales;
    auto tiles = [&] {
      if constexpr (kIsGrouped) {
        return slots;
      } else {
        return Tiles<C>();
      }
    }();
    while (tiles.Next(p, &tile)) {
      const WorkTile before = tiles.WorkTileOf(p, tile);
      const int steps = EndOf<C>(arguments, before, C::kPairs - 1), n0 = tile.n0;
      if constexpr (C::kGrouping == Grouping::kRows) {
        // Others have the tensor cores to themselves where no row of this warpgroup is written.
        const int first = before.m0 + group_row;
        if (first >= before.rows || first + 64 * C::kSubtiles <= before.first_row) {
          for (int step = 0; step < steps; ++step, ring.Advance()) {
            BarrierWait(full + 8 * ring.stage, ring.parity);
            release(ring.stage);
          }
          tiles.Release(lane);
          continue;
        }
      }
      float total[C::kSubtiles][C::kBN / 2];
      if constexpr (C::kMode == Mode::kFast) {
        if constexpr (kIsGrouped) {
#pragma unroll
          for (int s = 0; s < C::kSubtiles; ++s) {
#pragma unroll
            for (int i = 0; i < C::kBN / 2; ++i) total[s][i] = 0.0f;  // there may be no steps
          }
        }
        for (int step = 0; step < steps; ++step, ring.Advance()) {
          BarrierWait(full + 8 * ring.stage, ring.parity);
          keep_group(before, step);
#pragma unroll
          for (int s = 0; s < C::kSubtiles; ++s) Pin(total[s]);
          WgmmaFence();
#pragma unroll
          for (int s = 0; s < C::kSubtiles; ++s) multiply(total[s], s * 64, step > 0);
          WgmmaCommit();
#pragma unroll
          for (int s = 0; s < C::kSubtiles; ++s) Pin(total[s]);
          WgmmaWait<1>();  // the step before this one
          if (step > 0) release(ring.stage == 0 ? C::kStages - 1 : ring.stage - 1);
        }
        WgmmaWait<0>();
        if (!kIsGrouped || steps > 0) release(ring.stage == 0 ? C::kStages - 1 : ring.stage - 1);
#pragma unroll
        for (int s = 0; s < C::kSubtiles; ++s) Pin(total[s]);
      } else {
        static_assert(C::kMode != Mode::kBlock || C::kBN == 128);
#pragma unroll
        for (int s = 0; s < C::kSubtiles; ++s) ClearOutOfStep<C>(total[s], TileDescriptor(TileAddress(zeros), 0));
        bool ready = BarrierTest(full + 8 * ring.stage, ring.parity);
        int step = 0;
        // Pairs in a loop of their own, so that nothing of them lies between two products.
#pragma unroll 1
        for (int pair = 0; pair < C::kPairs; ++pair) {
          const int first_column_scale = FirstColumnScale<C>(arguments, before.product, n0, all_steps, pair);
          uint32_t column = 4 * (first_column_scale + before.first_step & 3);  // of their scale in its box, in bytes
          const int end = EndOf<C>(arguments, before, pair);
          for (; step < end; ++step) {
            if (!ready) BarrierWait(full + 8 * ring.stage, ring.parity);
            keep_group(before, step);
            const uint32_t of_rows = scales_of_rows + ring.stage * C::kBytesScales;
            const uint32_t of_columns = scale_of_columns + ring.stage * C::kBytesScales + column;
            float partial[C::kBN / 2];
#pragma unroll
            for (int s = 0; s < C::kSubtiles; ++s) {
              float scale[2] = {};
              auto read_scales = [&] {
                const float scale_b = LoadShared(of_columns);
                scale[0] = scale_b * LoadShared(of_rows + 4 * (s * 64));
                scale[1] = scale_b * LoadShared(of_rows + 4 * (s * 64 + 8));
              };
              // With two products a step, best while the first runs: among the additions before the second.
              const bool reads_first = C::kSubtiles == 1 || s > 0;
              if (C::kMode == Mode::kBlock && reads_first) read_scales();
              Pin(partial);
              WgmmaFence();
              multiply(partial, s * 64, false);
              WgmmaCommit();
              Pin(partial);
              if (C::kMode == Mode::kBlock && !reads_first) read_scales();
              WgmmaWait<0>();
              if (s == C::kSubtiles - 1) {
                release(ring.stage);
                ring.Advance();
                column = (column + 4) & 12;
                ready = BarrierTest(full + 8 * ring.stage, ring.parity);
              }
#pragma unroll
              for (int i = 0; i < C::kBN / 8; ++i) {
                if constexpr (C::kMode == Mode::kBlock) {
                  total[s][4 * i] += scale[0] * partial[4 * i];
                  total[s][4 * i + 1] += scale[0] * partial[4 * i + 1];
                  total[s][4 * i + 2] += scale[1] * partial[4 * i + 2];
                  total[s][4 * i + 3] += scale[1] * partial[4 * i + 3];
                } else {
#pragma unroll
                  for (int j = 0; j < 4; ++j) total[s][4 * i + j] += partial[4 * i + j];
                }
              }
            }
          }
        }
      }

      // Once more, rather than keep it in registers.
      Epilogue<C>(arguments, total, tiles.WorkTileOf(p, tile), group_row, n0, warp_staging).Run();
      if constexpr (kIsGrouped) tiles.Release(lane);
    }
    if (lane == 0) BulkWaitRead();  // shared memory must outlive what is sent from it
  }
  __syncwarp();
  // A block's shared memory must outlive what its neighbour sends there.
  ClusterSync();
}

}  // namespace te::gemm::hopper
