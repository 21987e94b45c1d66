#include "grouped_gemm/hopper_launch.cuh"

namespace te::gemm::hopper {

Status RunGroupedSumsPromoted(cudaStream_t stream, const Problem& problem, const Groups& groups) {
  return RunGroupedFormats<Grouping::kSums, Mode::kPromote>(stream, problem, groups);
}

}  // namespace te::gemm::hopper
