// Which library or kernel multiplies what on a GPU.

#include <cstdint>

#include "common/vector.cuh"
#include "gemm/cublaslt.h"
#include "gemm/gemm.h"
#include "gemm/hopper.h"
#include "gemm/hopper_tiles.h"

namespace te::gemm {
namespace {

bool UsesCublasLt(const Problem& p) {
  if (p.scaling == Scaling::kNone) return true;
  if (p.algorithm == Algorithm::kTeJax) return false;
  const bool scales_differ = p.batch.count > 1 && (p.batch.a_scales_stride != 0 || p.batch.b_scales_stride != 0);
  if (scales_differ && !p.gelu) return false;  // cuBLASLt 13.1 knows no stride of scales
  if (p.scaling == Scaling::kTensor) return true;
  // With a scale for each row it adds no bias to float32 results.
  return OnSixteenBytes(p.a.scales) && OnSixteenBytes(p.b.scales) && !(p.bias != nullptr && p.d_type == Type::kFloat32);
}

// What the package's kernel needs of FP8 operands that sum over k values.
Status Refusal(const Problem& p, int64_t k, bool may_have_few_rows) {
  const bool any_rows = may_have_few_rows && hopper::HasFewRows(p.batch.count, p.m, p.n);
  if (k % 16 != 0 || p.n % 16 != 0 || (p.scaling == Scaling::kBlock && p.m % 4 != 0 && !any_rows)) {
    return Status::Failed(
        "FP8 operands must have multiples of 16 summed values and of 16 outer ones in b, and with blocks of 4 in a");
  }
  return Status::Ok();
}

Status RunOne(cudaStream_t stream, const Problem& p) {
  if (UsesCublasLt(p)) return cublaslt::Run(stream, p);
  if (Status status = Refusal(p, p.k, true); !status.ok()) return status;
  return hopper::Run(stream, p);
}

}  // namespace

Status Run(const Executor& executor, const Problem& p) {
  if (p.k == 0) return Status::Failed("there is nothing to sum over");
  if (p.batch.count == 1 || !UsesCublasLt(p)) return RunOne(executor.stream, p);
  // cuBLASLt need not have an algorithm for every batch whose products it has one for.
  bool has_algorithm = false;
  if (!p.gelu && cublaslt::Run(executor.stream, p, &has_algorithm).ok() && has_algorithm) return Status::Ok();
  for (int64_t i = 0; i < p.batch.count; ++i) {
    if (Status status = RunOne(executor.stream, MemberOf(p, i)); !status.ok()) return status;
  }
  return Status::Ok();
}

Status RunSum(const Executor& executor, const Problem& p, std::span<const OperandPair> more) {
  if (Status status = Refusal(p, p.k, false); !status.ok()) return status;
  for (const OperandPair& pair : more) {
    if (Status status = Refusal(p, pair.k, false); !status.ok()) return status;
  }
  return more.size() == 1 ? hopper::RunSumOfTwo(executor.stream, p, more)
                          : hopper::RunSumOfThree(executor.stream, p, more);
}

Status Prepare(const Executor& executor, const Problem& p) {
  if (!UsesCublasLt(p) || p.k == 0) return Status::Ok();
  if (p.batch.count == 1) return cublaslt::Prepare(executor.stream, p);
  bool has_algorithm = false;
  if (!p.gelu && cublaslt::Prepare(executor.stream, p, &has_algorithm).ok() && has_algorithm) return Status::Ok();
  return cublaslt::Prepare(executor.stream, MemberOf(p, 0));
}

}  // namespace te::gemm
