#include "grouped_gemm/hopper_launch.cuh"

namespace te::gemm::hopper {

Status RunGroupedSumsBlock(cudaStream_t stream, const Problem& problem, const Groups& groups) {
  return RunGroupedFormats<Grouping::kSums, Mode::kBlock>(stream, problem, groups);
}

}  // namespace te::gemm::hopper
