// Which configuration of the kernel a product gets: that of fewest cycles. Nothing here needs CUDA, so that a test can
// ask it (tests/native/test_tiles.py).
#pragma once

#include <cstdint>
#include <span>

namespace te::gemm::hopper {

enum class Mode { kFast, kPromote, kBlock };

// Columns of the tile of a cluster, of which each of its two blocks has half.
inline constexpr int kClusterColumns = 256;

// Whether a product with scales of blocks goes to the kernel for few rows of d (hopper_few_rows.cu). For more than 8 it
// multiplies twice, and tiles are faster where there are enough columns for half of the multiprocessors.
constexpr bool HasFewRows(int64_t products, int64_t m, int64_t n) {
  return m <= 8 || (m <= 16 && products * n <= 5120);
}

struct TileCost {
  int rows;
  double step_cycles;  // of a step of 128 bytes of k
  double tile_cycles;  // of all that a tile takes beside its steps
};

// Measured on an H200 (docs/measurements.md). The tensor cores alone would take 4 cycles for each row of a step. With
// scales of blocks, what counts is the time at the power limit: three warpgroups take 2% more of it, and one has nobody
// to add its sums behind.
constexpr TileCost CostOf(Mode mode, int groups, int subtiles) {
  const int rows = 64 * groups * subtiles;
  double step = 0;
  switch (mode) {
    case Mode::kFast:
      step = groups == 3 ? 4.10 : 4.04;
      break;
    case Mode::kPromote:
      step = groups == 3 ? 4.12 : 4.32;
      break;
    case Mode::kBlock:
      step = groups == 3 ? 4.80 : subtiles == 2 ? 4.69 : groups == 2 ? 5.1 : 7.6;
      break;
  }
  return {rows, step * rows, (mode == Mode::kBlock ? 9.0 : 14.5) * rows};
}

constexpr int64_t RoundedUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What decides between configurations is how many rounds of clusters their tiles need.
constexpr double Cycles(const TileCost& cost, int64_t products, int64_t m, int64_t n, int64_t steps, int clusters) {
  const int64_t tiles = products * RoundedUp(m, cost.rows) * RoundedUp(n, kClusterColumns);
  return static_cast<double>(RoundedUp(tiles, clusters)) *
         (static_cast<double>(steps) * cost.step_cycles + cost.tile_cycles);
}

// The place of the cheapest one, the first of equals.
constexpr int Cheapest(std::span<const TileCost> costs, int64_t products, int64_t m, int64_t n, int64_t steps,
                       int clusters) {
  int best = 0;
  for (int i = 1; i < static_cast<int>(costs.size()); ++i) {
    const double cycles = Cycles(costs[i], products, m, n, steps, clusters);
    if (cycles < Cycles(costs[best], products, m, n, steps, clusters)) best = i;
  }
  return best;
}

}  // namespace te::gemm::hopper
