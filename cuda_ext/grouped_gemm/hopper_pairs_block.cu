#include "grouped_gemm/hopper_launch.cuh"

namespace te::gemm::hopper {

Status RunGroupedPairsBlock(cudaStream_t stream, const Problem& problem, const OperandPair& second,
                            const Groups& groups) {
  return RunGroupedFormats<Grouping::kRows, Mode::kBlock, 2>(stream, problem, groups, &second);
}

}  // namespace te::gemm::hopper
