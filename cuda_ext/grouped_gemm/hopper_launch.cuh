// Choosing a tile for groups whose sizes only the device knows, and launching the kernel of one mode and pair of
// formats.
#pragma once

#include <algorithm>

#include "gemm/hopper_launch.cuh"
#include "grouped_gemm/hopper.h"

namespace te::gemm::hopper {

// Tiles that are enough for rows in groups of any sizes; where sums are grouped, how many there are.
template <typename C>
int64_t MostGroupedTiles(const Problem& problem, const Groups& groups) {
  const int64_t columns = CeilDiv(problem.n, C::kClusterN);
  if (C::kGrouping == Grouping::kSums) return groups.count * columns * CeilDiv(problem.m, C::kClusterM);
  const int64_t rows = static_cast<int64_t>(groups.parts) * groups.rows_of_part;
  return (rows / C::kClusterM + 2 * RangesOf(groups)) * columns;
}

// As `Cycles`, for equal groups. Where rows are grouped, warpgroups without rows leave the tensor cores to others, so
// that a group has 32 rows too many on average; with scales of blocks callers pad groups to whole blocks (ops.permute).
template <typename C>
double GroupedCycles(const Problem& problem, const Groups& groups, int clusters) {
  const double columns = CeilDiv(problem.n, C::kClusterN);
  if constexpr (C::kGrouping == Grouping::kSums) {
    const int64_t tiles = MostGroupedTiles<C>(problem, groups);
    const double steps = static_cast<double>(problem.k) / (C::kBK * std::max(groups.count, 1));
    return static_cast<double>((tiles + clusters - 1) / clusters) *
           (steps * C::kCost.step_cycles + C::kCost.tile_cycles);
  } else {
    const double in_groups = groups.parts * groups.count,
                 rows = static_cast<double>(groups.parts) * groups.rows_of_part;
    constexpr double kUnusedRows = C::kMode == Mode::kBlock ? 0 : 32 * C::kSubtiles;
    const double tiles = columns * std::max(in_groups, (rows + kUnusedRows * in_groups) / C::kClusterM);
    const int steps = C::kPairs * CeilDiv(problem.k, C::kBK);
    return std::max(tiles / clusters, 1.0) * (steps * C::kCost.step_cycles + C::kCost.tile_cycles);
  }
}

template <typename C>
Status LaunchGrouped(cudaStream_t stream, const Problem& problem, Groups groups, int most_clusters,
                     const OperandPair* second = nullptr) {
  ArgumentsOf<C> arguments{};
  arguments.groups = groups;
  if (Status s = Describe<C>(arguments, problem); !s.ok()) return s;
  if (Status s = DescribeMore<C>(arguments, problem, {second, second == nullptr ? 0u : 1u}); !s.ok()) return s;
  // As many parts at once as have room in shared memory.
  constexpr int kRanges = (kSharedBytes - C::kBytes) / (C::kGrouping == Grouping::kRows ? 8 : 4) - 1;
  const int parts_at_once = kRanges / (groups.count + 2), parts = groups.parts;
  if (parts_at_once == 0) {
    return Status::Failed("there are " + std::to_string(groups.count) + " groups, and the GPU kernel takes " +
                          std::to_string(kRanges - 2));
  }
  for (int first = 0; first < parts; first += parts_at_once) {
    groups.first_part = first;
    groups.parts = std::min(parts_at_once, parts - first);
    arguments.groups = groups;
    const int64_t tiles = MostGroupedTiles<C>(problem, groups);
    const int clusters = static_cast<int>(std::min<int64_t>(tiles, most_clusters));
    if (Status s = Start<C>(stream, arguments, clusters, BytesOfTable<C>(groups)); !s.ok()) return s;
  }
  return Status::Ok();
}

// With `second`, the sum of two pairs.
template <Product kProduct>
Status RunGroupedProduct(cudaStream_t stream, const Problem& problem, const Groups& groups,
                         const OperandPair* second = nullptr) {
  using First = Tile192<kProduct>;
  using Second = Tile256<kProduct>;
  int clusters = 0;
  TE_JAX_TRY(CountClusters(&clusters));
  if (GroupedCycles<Second>(problem, groups, clusters) < GroupedCycles<First>(problem, groups, clusters)) {
    return LaunchGrouped<Second>(stream, problem, groups, clusters, second);
  }
  return LaunchGrouped<First>(stream, problem, groups, clusters, second);
}

template <Grouping kGrouping, Mode kMode, int kPairs = 1>
Status RunGroupedFormats(cudaStream_t stream, const Problem& problem, const Groups& groups,
                         const OperandPair* second = nullptr) {
  constexpr auto product = [](Formats formats) {
    return Product{.formats = formats, .mode = kMode, .grouping = kGrouping, .pairs = kPairs};
  };
  if (problem.a.type == Type::kE5M2)
    return RunGroupedProduct<product(Formats::kE5M2E4M3)>(stream, problem, groups, second);
  if (problem.b.type == Type::kE5M2)
    return RunGroupedProduct<product(Formats::kE4M3E5M2)>(stream, problem, groups, second);
  return RunGroupedProduct<product(Formats::kE4M3E4M3)>(stream, problem, groups, second);
}

}  // namespace te::gemm::hopper
