#include "gemm/hopper_launch.cuh"

namespace te::gemm::hopper {

Status RunFast(cudaStream_t stream, const Problem& problem) { return RunFormats<Mode::kFast>(stream, problem); }

}  // namespace te::gemm::hopper
