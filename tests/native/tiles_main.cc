// Prints, for lines "products m n k" on standard input, the rows of the tile that a product with scales of blocks gets
// on an H100 or H200: 0 for the kernel of few rows.
#include <array>
#include <iostream>

#include "gemm/hopper_tiles.h"

int main() {
  using namespace te::gemm::hopper;
  constexpr Mode kMode = Mode::kBlock;
  constexpr std::array kCosts = {CostOf(kMode, 3, 1), CostOf(kMode, 2, 2), CostOf(kMode, 2, 1), CostOf(kMode, 1, 1)};
  constexpr int kClusters = 66;
  for (int64_t products, m, n, k; std::cin >> products >> m >> n >> k;) {
    const int best = Cheapest(kCosts, products, m, n, RoundedUp(k, 128), kClusters);
    std::cout << (HasFewRows(products, m, n) ? 0 : kCosts[best].rows) << "\n";
  }
}
