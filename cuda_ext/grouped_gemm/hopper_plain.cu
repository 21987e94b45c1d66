#include "grouped_gemm/hopper_launch.cuh"

namespace te::gemm::hopper {

namespace {

// The tensor cores keep sums of bfloat16 products in float32, so that these may stay there.
constexpr Product Plain(Grouping grouping, bool a_summed_first, bool b_summed_first) {
  return {.formats = Formats::kBFloat16,
          .mode = Mode::kFast,
          .grouping = grouping,
          .a_summed_first = a_summed_first,
          .b_summed_first = b_summed_first};
}

}  // namespace

Status RunGroupedRowsPlain(cudaStream_t stream, const Problem& problem, const Groups& groups) {
  if (problem.b.summed_first) {
    return RunGroupedProduct<Plain(Grouping::kRows, false, true)>(stream, problem, groups);
  }
  return RunGroupedProduct<Plain(Grouping::kRows, false, false)>(stream, problem, groups);
}

Status RunGroupedSumsPlain(cudaStream_t stream, const Problem& problem, const Groups& groups) {
  return RunGroupedProduct<Plain(Grouping::kSums, true, true)>(stream, problem, groups);
}

}  // namespace te::gemm::hopper
