#include "grouped_gemm/hopper_launch.cuh"

namespace te::gemm::hopper {

Status RunGroupedPairsPlain(cudaStream_t stream, const Problem& problem, const OperandPair& second,
                            const Groups& groups) {
  if (problem.b.summed_first) {
    return RunGroupedMode<Grouping::kRows, Formats::kBFloat16, Mode::kFast, 2, false, true>(stream, problem, groups,
                                                                                            &second);
  }
  return RunGroupedMode<Grouping::kRows, Formats::kBFloat16, Mode::kFast, 2>(stream, problem, groups, &second);
}

}  // namespace te::gemm::hopper
