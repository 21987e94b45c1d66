// Which library or kernel multiplies what on a GPU.

#include <cstdint>

#include "common/cuda_status.h"
#include "common/vector.cuh"
#include "gemm/cublaslt.h"
#include "gemm/gemm.h"
#include "gemm/hopper.h"

namespace te::gemm {
namespace {

bool UsesCublasLt(const Problem& p) {
  if (p.scaling == Scaling::kNone) return true;
  if (p.own_kernel || p.scaling == Scaling::kBlock) return false;
  if (p.scaling == Scaling::kTensor) return true;
  // With a scale for each row cuBLASLt 13.1 adds no bias to float32 results.
  return OnSixteenBytes(p.a.scales) && OnSixteenBytes(p.b.scales) && !(p.bias != nullptr && p.d_type == Type::kFloat32);
}

hopper::Problem OwnProblem(const Problem& p) {
  hopper::Problem own{};
  own.m = p.m;
  own.n = p.n;
  own.k = p.k;
  own.a = p.a.data;
  own.a_is_e5m2 = p.a.type == Type::kE5M2;
  own.b = p.b.data;
  own.b_is_e5m2 = p.b.type == Type::kE5M2;
  own.scaling = p.scaling == Scaling::kTensor ? hopper::Scaling::kTensor
                : p.scaling == Scaling::kRow  ? hopper::Scaling::kRow
                                              : hopper::Scaling::kBlock;
  own.a_scale_inv = p.a.scales;
  own.b_scale_inv = p.b.scales;
  own.bias = p.bias;
  own.d = p.d;
  own.d_type = DTypeOf(p.d_type);
  own.accumulate = p.accumulator != nullptr;
  own.fast_accumulation = p.fast_accumulation;
  return own;
}

// Copies scales that are not aligned to 16 bytes, as those of a batch may be, into the workspace.
class Aligner {
 public:
  Aligner(cudaStream_t stream, const Problem& p)
      : stream_(stream),
        next_(reinterpret_cast<uintptr_t>(p.workspace)),
        end_(reinterpret_cast<uintptr_t>(p.workspace) + p.workspace_bytes) {}

  Status Align(const float*& scales, int64_t count) {
    if (reinterpret_cast<uintptr_t>(scales) % 16 == 0) return Status::Ok();
    const size_t bytes = count * sizeof(float);
    next_ = (next_ + 15) / 16 * 16;
    if (next_ + bytes > end_) return Status::Failed("the workspace does not hold the scales that are not aligned");
    void* copy = reinterpret_cast<void*>(next_);
    next_ += bytes;
    const cudaError_t copied = cudaMemcpyAsync(copy, scales, bytes, cudaMemcpyDeviceToDevice, stream_);
    scales = static_cast<const float*>(copy);
    return Check(copied, "copy of scales");
  }

 private:
  cudaStream_t stream_;
  uintptr_t next_, end_;
};

Status RunOwn(cudaStream_t stream, const Problem& p) {
  if (p.k % 16 != 0 || p.n % 16 != 0 || (p.scaling == Scaling::kBlock && p.m % 4 != 0)) {
    return Status::Failed(
        "FP8 operands must have multiples of 16 summed values and of 16 outer ones in b, and with blocks of 4 in a");
  }
  hopper::Problem own = OwnProblem(p);
  Aligner aligner(stream, p);
  if (Status status = aligner.Align(own.a_scale_inv, ScaleCount(p, p.m, false)); !status.ok()) return status;
  if (Status status = aligner.Align(own.b_scale_inv, ScaleCount(p, p.n, true)); !status.ok()) return status;
  if (p.accumulator != nullptr && p.accumulator != p.d) {
    const size_t bytes = static_cast<size_t>(p.m * p.n * SizeOf(p.d_type));
    const cudaError_t copied = cudaMemcpyAsync(p.d, p.accumulator, bytes, cudaMemcpyDeviceToDevice, stream);
    if (Status status = Check(copied, "copy of the accumulator"); !status.ok()) return status;
  }
  return hopper::Run(stream, own);
}

Status RunOne(cudaStream_t stream, const Problem& p) {
  return UsesCublasLt(p) ? cublaslt::Run(stream, p) : RunOwn(stream, p);
}

// For scales of rows cuBLASLt 13.1 knows no stride.
bool MayRunAtOnce(const Problem& p) { return UsesCublasLt(p) && p.scaling != Scaling::kRow; }

}  // namespace

Status Run(const Executor& executor, const Problem& p) {
  if (p.k == 0) return Status::Failed("there is nothing to sum over");
  if (p.batch.count == 1) return RunOne(executor.stream, p);
  // It need not have an algorithm for every batch whose products it has one for.
  if (MayRunAtOnce(p) && cublaslt::Run(executor.stream, p).ok()) return Status::Ok();
  for (int64_t i = 0; i < p.batch.count; ++i) {
    if (Status status = RunOne(executor.stream, MemberOf(p, i)); !status.ok()) return status;
  }
  return Status::Ok();
}

Status Prepare(const Executor& executor, const Problem& p) {
  if (!UsesCublasLt(p) || p.k == 0) return Status::Ok();
  if (p.batch.count == 1) return cublaslt::Prepare(executor.stream, p);
  if (MayRunAtOnce(p) && cublaslt::Prepare(executor.stream, p).ok()) return Status::Ok();
  return cublaslt::Prepare(executor.stream, MemberOf(p, 0));
}

}  // namespace te::gemm
