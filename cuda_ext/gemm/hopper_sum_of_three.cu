#include "gemm/hopper_launch.cuh"

namespace te::gemm::hopper {

Status RunSumOfThree(cudaStream_t stream, const Problem& problem, std::span<const OperandPair> more) {
  return RunFormats<Mode::kBlock, 3>(stream, problem, more);
}

}  // namespace te::gemm::hopper
