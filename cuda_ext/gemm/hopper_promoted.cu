#include "gemm/hopper_launch.cuh"

namespace te::gemm::hopper {

Status RunPromoted(cudaStream_t stream, const Problem& problem) { return RunFormats<Mode::kPromote>(stream, problem); }

}  // namespace te::gemm::hopper
