#include "grouped_gemm/hopper_launch.cuh"

namespace te::gemm::hopper {

// The tensor cores keep sums of bfloat16 products in float32, so that these may stay there.
Status RunGroupedRowsPlain(cudaStream_t stream, const Problem& problem, const Groups& groups) {
  if (problem.b.summed_first) {
    return RunGroupedMode<Grouping::kRows, Formats::kBFloat16, Mode::kFast, 1, false, true>(stream, problem, groups);
  }
  return RunGroupedMode<Grouping::kRows, Formats::kBFloat16, Mode::kFast>(stream, problem, groups);
}

Status RunGroupedSumsPlain(cudaStream_t stream, const Problem& problem, const Groups& groups) {
  return RunGroupedMode<Grouping::kSums, Formats::kBFloat16, Mode::kFast, 1, true, true>(stream, problem, groups);
}

}  // namespace te::gemm::hopper
