#include "gemm/hopper_launch.cuh"

namespace te::gemm::hopper {

Status RunBlock(cudaStream_t stream, const Problem& problem) { return RunFormats<Mode::kBlock>(stream, problem); }

}  // namespace te::gemm::hopper
