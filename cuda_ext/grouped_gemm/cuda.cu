// Each example is a launch, or one for as many parts of its rows as have room for their bounds in shared memory.

#include "common/cuda_status.h"
#include "grouped_gemm/grouped_gemm.h"
#include "grouped_gemm/hopper.h"

namespace te::grouped_gemm {
namespace {

// Rules of TMA, which reads and writes all arrays but bounds and bias.
Status Refusal(const gemm::Problem& p, bool grouped_sums) {
  if (p.scaling == gemm::Scaling::kNone) {
    if (p.a.type != gemm::Type::kBFloat16) return Status::Failed("plain operands must be bfloat16 on a GPU");
    if (p.n % 8 != 0 || (grouped_sums ? p.m : p.k) % 8 != 0) {
      return Status::Failed("rows of plain operands must have multiples of 8 values on a GPU");
    }
    return Status::Ok();
  }
  if (p.k % 16 != 0 || p.n % 16 != 0 || (p.scaling == gemm::Scaling::kBlock && p.m % 4 != 0)) {
    return Status::Failed(
        "FP8 operands must have multiples of 16 summed values and of 16 outer ones in b, and with blocks of 4 in a");
  }
  return Status::Ok();
}

// D where nothing is summed: zeros, or the accumulator.
Status WriteNothing(cudaStream_t stream, const gemm::Problem& p, size_t bytes) {
  if (p.accumulator == nullptr) return Check(cudaMemsetAsync(p.d, 0, bytes, stream), "zeros");
  if (p.accumulator == p.d) return Status::Ok();
  return Check(cudaMemcpyAsync(p.d, p.accumulator, bytes, cudaMemcpyDeviceToDevice, stream), "copy of the accumulator");
}

Status RunExample(cudaStream_t stream, const Problem& problem) {
  gemm::Problem p = problem.product;
  p.batch.count = problem.groups;
  const int64_t rows = (problem.grouped_sums ? p.k : p.m) / problem.parts;
  const auto bytes = static_cast<size_t>((problem.grouped_sums ? problem.groups : 1) * p.m * p.n * SizeOf(p.d_type));
  if (problem.groups == 0 || (problem.grouped_sums && p.k == 0)) return WriteNothing(stream, p, bytes);
  const gemm::hopper::Groups groups{problem.bounds,
                                    static_cast<int>(problem.groups),
                                    static_cast<int>(rows),
                                    0,
                                    static_cast<int>(problem.parts),
                                    gemm::hopper::ScalesBefore(p.b)};
  const bool plain = p.scaling == gemm::Scaling::kNone, block = p.scaling == gemm::Scaling::kBlock;
  if (problem.second) {
    return plain ? gemm::hopper::RunGroupedPairsPlain(stream, p, *problem.second, groups)
                 : gemm::hopper::RunGroupedPairsBlock(stream, p, *problem.second, groups);
  }
  if (!problem.grouped_sums) {
    return plain   ? gemm::hopper::RunGroupedRowsPlain(stream, p, groups)
           : block ? gemm::hopper::RunGroupedRowsBlock(stream, p, groups)
                   : gemm::hopper::RunGroupedRowsPromoted(stream, p, groups);
  }
  // The kernel adds float32 to what d holds, and reads accumulators of 16 bits itself.
  if (p.d_type == gemm::Type::kFloat32 && p.accumulator != nullptr) {
    if (Status status = WriteNothing(stream, p, bytes); !status.ok()) return status;
  }
  return plain   ? gemm::hopper::RunGroupedSumsPlain(stream, p, groups)
         : block ? gemm::hopper::RunGroupedSumsBlock(stream, p, groups)
                 : gemm::hopper::RunGroupedSumsPromoted(stream, p, groups);
}

}  // namespace

Status Run(const Executor& executor, const Problem& problem) {
  if (!problem.grouped_sums && problem.product.k == 0) return Status::Failed("there is nothing to sum over");
  if (Status status = Refusal(problem.product, problem.grouped_sums); !status.ok()) return status;
  for (int64_t i = 0; i < problem.examples.count; ++i) {
    if (Status status = RunExample(executor.stream, ExampleOf(problem, i)); !status.ok()) return status;
  }
  return Status::Ok();
}

}  // namespace te::grouped_gemm
