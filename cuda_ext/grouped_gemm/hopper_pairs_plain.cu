#include "grouped_gemm/hopper_launch.cuh"

namespace te::gemm::hopper {

namespace {

constexpr Product PlainPairs(bool b_summed_first) {
  return {.formats = Formats::kBFloat16,
          .mode = Mode::kFast,
          .grouping = Grouping::kRows,
          .b_summed_first = b_summed_first,
          .pairs = 2};
}

}  // namespace

Status RunGroupedPairsPlain(cudaStream_t stream, const Problem& problem, const OperandPair& second,
                            const Groups& groups) {
  if (problem.b.summed_first) {
    return RunGroupedProduct<PlainPairs(true)>(stream, problem, groups, &second);
  }
  return RunGroupedProduct<PlainPairs(false)>(stream, problem, groups, &second);
}

}  // namespace te::gemm::hopper
