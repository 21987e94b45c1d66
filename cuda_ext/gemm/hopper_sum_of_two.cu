#include "gemm/hopper_launch.cuh"

namespace te::gemm::hopper {

Status RunSumOfTwo(cudaStream_t stream, const Problem& problem, std::span<const OperandPair> more) {
  return RunFormats<Mode::kBlock, 2>(stream, problem, more);
}

}  // namespace te::gemm::hopper
