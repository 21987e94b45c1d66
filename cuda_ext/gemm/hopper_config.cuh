// What an instance of the kernel is made for: how it sums, its tile, and how it divides registers and shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gemm/hopper.h"
#include "gemm/hopper_tiles.h"
#include "gemm/hopper_wgmma.cuh"

namespace te::gemm::hopper {

// Which rows come in groups: none, those of a and d, or those that are summed over (hopper_groups.cuh).
enum class Grouping { kNone, kRows, kSums };

inline constexpr int kSharedBytes = 227 * 1024;  // that a block may have

struct Arguments {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap d;
  CUtensorMap a_scales, b_scales;  // of blocks, each as one long row
  Problem problem;
  Groups groups;
};

// The arguments of a kernel that adds the products of several pairs of operands, the first of which is `Arguments`'
// own.
template <int kPairs>
struct SumArguments : Arguments {
  struct Pair {
    CUtensorMap a;
    CUtensorMap b;
    CUtensorMap a_scales, b_scales;
    int b_scales_before;  // as of Groups
  };
  Pair more[kPairs - 1];
  int ends[kPairs];  // of each pair, in steps from the first one's begin
};

// The products that an instance computes.
struct Product {
  Formats formats;
  Mode mode;
  Grouping grouping = Grouping::kNone;
  bool a_summed_first = false, b_summed_first = false;
  // How many pairs of operands are multiplied and added, one pair's steps after the other's. Scales that are applied
  // after the last step know one pair only.
  int pairs = 1;
};

struct TileShape {
  int groups;        // warpgroups that multiply
  int subtiles;      // of 64 rows, for each of them
  int stages;        // of the ring of loaded operands
  int staged_boxes;  // of 16 rows and 128 bytes of d, for each warp
};

template <Product kProduct, TileShape kTile>
struct Config {
  static constexpr Formats kFormats = kProduct.formats;
  static constexpr Mode kMode = kProduct.mode;
  static constexpr Grouping kGrouping = kProduct.grouping;
  static constexpr bool kASummedFirst = kProduct.a_summed_first, kBSummedFirst = kProduct.b_summed_first;
  static constexpr int kPairs = kProduct.pairs;
  static_assert(kPairs == 1 || (kGrouping == Grouping::kRows && kMode != Mode::kPromote) ||
                (kGrouping == Grouping::kNone && kMode == Mode::kBlock));
  static constexpr int kGroups = kTile.groups, kSubtiles = kTile.subtiles;
  static constexpr int kLine =
      128;  // bytes of a line of a tile: a row of it, or with the summed values first 64 of one
  static constexpr int kBM = 64 * kGroups * kSubtiles, kBN = 128, kBK = kLine / BytesOf(kFormats);
  static constexpr int kStages = kTile.stages, kStagedBoxes = kTile.staged_boxes;
  static constexpr int kBand = 8;
  static constexpr int kSlots = kGrouping == Grouping::kNone ? 0 : 4;  // see `TileSlots`
  static constexpr int kMathWarps = 4 * kGroups;
  static constexpr int kThreads = 128 + 32 * kMathWarps;
  // One warpgroup and the warps that feed it have as many as a thread can have.
  static constexpr int kMathRegisters = kGroups == 3 ? 160 : kGroups == 2 ? 232 : 0;
  static constexpr int kFeedRegisters = kGroups == 3 ? 32 : 40;

  // Shared memory, in order; tiles and boxes must lie on 1024 bytes.
  static constexpr int kBytesZeros = kMode == Mode::kFast ? 0 : 1024;
  static constexpr int kBytesA = kBM * kLine, kBytesB = kBN * kLine, kBytesBox = 16 * 128;
  static constexpr int kBytesStaging = kMathWarps * kStagedBoxes * kBytesBox;
  // A step loads the scales of its rows, and four more, of which one is that of all columns: TMA traps where a box
  // begins with anything but a multiple of 16 bytes. Rows come in multiples of four (hopper.h). In shared memory a box
  // begins at 128 bytes.
  static constexpr int kBoxScalesA = kBM, kBoxScalesB = 4;
  static constexpr int kBytesRowScales = 4 * kBM;
  static constexpr int kBytesScales = kMode == Mode::kBlock ? kBytesRowScales + 128 : 0;
  static constexpr int kBytesSlot = 32 + 2 * static_cast<int>(sizeof(uint64_t));
  static constexpr int kBytesLoaded = kBytesA + kBytesB + (kMode == Mode::kBlock ? 4 * (kBoxScalesA + kBoxScalesB) : 0);
  static constexpr int kBytes = 1024 + kBytesZeros + kStages * (kBytesA + kBytesB + kBytesScales) + kBytesStaging +
                                2 * kStages * static_cast<int>(sizeof(uint64_t)) + kSlots * kBytesSlot;
  static_assert(kBytes <= kSharedBytes);

  // Rows and columns of a cluster's tile, and lines of what is loaded at once. With the summed values first, 64 rows
  // are kBK lines, of which each block of the cluster sends half to both.
  static constexpr int kClusterM = kBM, kClusterN = 2 * kBN;
  static constexpr int kBytes64Rows = 64 * kLine;
  static constexpr int kBoxA = kASummedFirst ? kBK / 2 : kBM / 2, kBoxB = kBSummedFirst ? kBK : kBN;

  static constexpr TileCost kCost = CostOf(kMode, kGroups, kSubtiles);
  static_assert(kCost.rows == kClusterM && kClusterColumns == kClusterN);
};

// A place in the ring of stages or slots, and the parity of its round.
template <int kStages>
struct Ring {
  uint32_t stage = 0, parity = 0;
  __device__ void Advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

__host__ __device__ constexpr int CeilDiv(int64_t a, int b) { return static_cast<int>((a + b - 1) / b); }

template <typename C>
__host__ __device__ int ClusterTiles(const Problem& problem) {
  return static_cast<int>(problem.batch.count) * CeilDiv(problem.m, C::kClusterM) * CeilDiv(problem.n, C::kClusterN);
}

}  // namespace te::gemm::hopper
