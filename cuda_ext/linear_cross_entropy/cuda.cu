// A thread for each feature of each token. In kernels [width, vocab] the values of a column lie apart: each is read for
// dx, read and written for dkernel, with the 64 bytes around it. Neighbouring thread blocks have neighbouring columns,
// so that labels which are close share them. In kernels [vocab, width] columns are contiguous.

#include <climits>

#include "common/cuda_status.h"
#include "common/vector.cuh"
#include "linear_cross_entropy/linear_cross_entropy.h"

namespace te::linear_cross_entropy {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) Subtract(const Labels labels) {
  const T* const x = static_cast<const T*>(labels.x);
  const int64_t place = blockIdx.x;
  const int64_t i = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (i >= labels.width || labels.TokenAt(place) < 0) return;
  const int32_t column = labels.columns[place];
  const bool here = 0 <= column && column < labels.vocab;
  if (labels.dx) {
    const int64_t token = labels.order[place], at = token * labels.width + i;
    float value = labels.dx_without[at];
    if (here) value -= labels.factor[token] * ToFloat(static_cast<const T*>(labels.kernel)[labels.At(i, column)]);
    static_cast<T*>(labels.dx)[at] = FromFloat<T>(value);
  }
  const bool first = place == 0 || labels.columns[place - 1] != column;
  if (!here || !first || !(labels.dkernel || labels.dbias)) return;
  float sum = 0.0f, factors = 0.0f;
  for (int64_t other = place; other < labels.tokens && labels.columns[other] == column; ++other) {
    const int64_t token = labels.TokenAt(other);
    if (token < 0) continue;
    const float factor = labels.factor[token];
    factors += factor;
    if (labels.dkernel) sum += factor * ToFloat(x[token * labels.width + i]);
  }
  if (labels.dkernel) labels.dkernel[labels.At(i, column)] -= sum;
  if (labels.dbias && i == 0) labels.dbias[column] -= factors;
}

}  // namespace

Status SubtractLabels(const Executor& executor, const Labels& labels) {
  if (labels.tokens == 0) return Status::Ok();
  const int64_t stretches = (labels.width + kThreads - 1) / kThreads;
  if (labels.tokens > INT_MAX || stretches > 65535) {
    return Status::Failed("x is too large: it may have 2^31 tokens and 16776960 features");
  }
  const dim3 grid(static_cast<unsigned>(labels.tokens), static_cast<unsigned>(stretches));
  auto* kernel = labels.dtype == DType::kFloat32    ? Subtract<float>
                 : labels.dtype == DType::kBFloat16 ? Subtract<__nv_bfloat16>
                                                    : Subtract<__half>;
  kernel<<<grid, kThreads, 0, executor.stream>>>(labels);
  return Check(cudaGetLastError(), "kernel launch");
}

}  // namespace te::linear_cross_entropy
