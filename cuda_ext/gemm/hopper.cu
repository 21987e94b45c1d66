#include "gemm/hopper_launch.cuh"

namespace te::gemm::hopper {

Status Run(cudaStream_t stream, const Problem& problem) {
  if (problem.m == 0 || problem.n == 0) return Status::Ok();
  if (problem.scaling == Scaling::kBlock) return RunBlock(stream, problem);
  return problem.fast_accumulation ? RunFast(stream, problem) : RunPromoted(stream, problem);
}

}  // namespace te::gemm::hopper
