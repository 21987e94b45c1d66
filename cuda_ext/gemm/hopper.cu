#include "common/cuda_status.h"
#include "gemm/hopper_launch.cuh"

namespace te::gemm::hopper {
namespace {

// The kernel adds float32 to what d holds.
Status CopyAccumulator(cudaStream_t stream, const Problem& problem) {
  for (int64_t i = 0; i < problem.batch.count; ++i) {
    const Problem member = MemberOf(problem, i);
    const auto bytes = static_cast<size_t>(problem.m * problem.n * SizeOf(problem.d_type));
    const cudaError_t copied = cudaMemcpyAsync(member.d, member.accumulator, bytes, cudaMemcpyDeviceToDevice, stream);
    if (Status status = Check(copied, "copy of the accumulator"); !status.ok()) return status;
  }
  return Status::Ok();
}

}  // namespace

Status Run(cudaStream_t stream, const Problem& problem) {
  if (problem.m == 0 || problem.n == 0) return Status::Ok();
  const bool in_blocks = problem.scaling == Scaling::kBlock;
  if (in_blocks && HasFewRows(problem.batch.count, problem.m, problem.n)) return RunFewRows(stream, problem);
  if (problem.d_type == Type::kFloat32 && problem.accumulator != nullptr && problem.accumulator != problem.d) {
    if (Status status = CopyAccumulator(stream, problem); !status.ok()) return status;
  }
  if (in_blocks) return RunBlock(stream, problem);
  return problem.fast_accumulation ? RunFast(stream, problem) : RunPromoted(stream, problem);
}

}  // namespace te::gemm::hopper
