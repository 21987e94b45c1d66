#include "grouped_gemm/hopper_launch.cuh"

namespace te::gemm::hopper {

Status RunGroupedRowsBlock(cudaStream_t stream, const Problem& problem, const Groups& groups) {
  return RunGroupedFormats<Grouping::kRows, Mode::kBlock>(stream, problem, groups);
}

}  // namespace te::gemm::hopper
