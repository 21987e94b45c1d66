// Gradients. As in forward.cu a thread block has rows in registers, one after the other; it sums those of gamma and
// beta over its rows.
//
// Bytes per bfloat16 value: 6, and 8 with the gradient of the sum. At 8192 × 4096 values and 3.0 TB/s (H100) that is
// 67 and 89 µs.

#include <cstdint>

#include "common/cuda_status.h"
#include "common/dependent_launch.cuh"
#include "common/vector.cuh"
#include "norm/norm.h"
#include "norm/rows.cuh"

namespace te::norm {
namespace {

struct BackwardJob {
  Inputs inputs;
  Statistics statistics;
  const void* dy;
  const void* dsum;
  Gradients gradients;
};

// One row of x, dy and dsum, and its statistics, in registers.
template <int kVectors>
struct GradientRow {
  float mean, rstd;
  uint4 x[kVectors];
  uint4 dy[kVectors];
  uint4 dsum[kVectors];
};

template <typename T, int kVectors>
__device__ __forceinline__ void LoadRow(const BackwardJob& job, int64_t row, int vectors, GradientRow<kVectors>& to) {
  to.mean = job.statistics.mean ? job.statistics.mean[row] : 0.0f;
  to.rstd = job.statistics.rstd[row];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * blockDim.x + threadIdx.x;
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    const int64_t at = row * vectors + v;
    to.x[i] = v < vectors ? LoadStreaming(static_cast<const uint4*>(job.inputs.x) + at) : zeros;
    to.dy[i] = v < vectors ? LoadStreaming(static_cast<const uint4*>(job.dy) + at) : zeros;
    to.dsum[i] = job.dsum && v < vectors ? LoadStreaming(static_cast<const uint4*>(job.dsum) + at) : zeros;
  }
}

template <typename T, int kVectors, bool kBeta>
__global__ void __launch_bounds__(kMostThreads) BackwardOfRows(const BackwardJob job) {
  constexpr int kCount = kPer16Bytes<T>;
  __shared__ BlockSums<float2>::Shared sums_of_warps;
  BlockSums<float2> sum_over_block(sums_of_warps);
  const Inputs& inputs = job.inputs;
  const T* const type = nullptr;
  const int64_t partials = job.gradients.partials, example = blockIdx.x / partials, partial = blockIdx.x % partials;
  const int vectors = static_cast<int>(inputs.cols / kCount);
  const float* const gamma = inputs.gamma + example * inputs.cols;
  constexpr bool kAhead = kVectors <= 2;  // registers hold the next row, too
  float dgamma[kVectors][kCount] = {}, dbeta[kVectors][kCount] = {};
  WaitForPrimary();
  GradientRow<kVectors> next;
  if (kAhead && partial < inputs.rows) LoadRow<T>(job, example * inputs.rows + partial, vectors, next);
  for (int64_t r = partial; r < inputs.rows; r += partials) {
    const int64_t row = example * inputs.rows + r;
    GradientRow<kVectors> current;
    if constexpr (kAhead) {
      current = next;
      if (r + partials < inputs.rows) LoadRow<T>(job, row + partials, vectors, next);
    } else {
      LoadRow<T>(job, row, vectors, current);
    }
    const float mean = current.mean, rstd = current.rstd;
    float2 sums = {};  // of dy · gamma · unit, and of dy · gamma
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = i * blockDim.x + threadIdx.x;
      if (v >= vectors) continue;
      float s[kCount], dy[kCount];
      Unpack(current.x[i], s, type);
      Unpack(current.dy[i], dy, type);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float unit = (s[j] - mean) * rstd, weighted = dy[j] * gamma[v * kCount + j];
        sums.x = fmaf(weighted, unit, sums.x);
        sums.y += weighted;
        dgamma[i][j] = fmaf(dy[j], unit, dgamma[i][j]);
        if constexpr (kBeta) dbeta[i][j] += dy[j];
      }
    }
    sums = sum_over_block(sums);
    const float of_unit = sums.x / inputs.cols, of_one = inputs.centered ? sums.y / inputs.cols : 0.0f;
    uint4* const to = static_cast<uint4*>(job.gradients.dx) + row * vectors;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = i * blockDim.x + threadIdx.x;
      if (v >= vectors) continue;
      float s[kCount], dy[kCount], dx[kCount];
      Unpack(current.x[i], s, type);
      Unpack(current.dy[i], dy, type);
      Unpack(current.dsum[i], dx, type);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float unit = (s[j] - mean) * rstd, weighted = dy[j] * gamma[v * kCount + j];
        dx[j] = fmaf(rstd, weighted - of_one - unit * of_unit, dx[j]);
      }
      to[v] = Pack(dx, type);
    }
  }
  auto put = [&](float* sums, const float (&values)[kVectors][kCount]) {
    float* const to = sums + blockIdx.x * inputs.cols;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = i * blockDim.x + threadIdx.x;
      if (v >= vectors) continue;
#pragma unroll
      for (int j = 0; j < kCount; j += 4) {
        *reinterpret_cast<float4*>(to + v * kCount + j) =
            make_float4(values[i][j], values[i][j + 1], values[i][j + 2], values[i][j + 3]);
      }
    }
  };
  put(job.gradients.dgamma, dgamma);
  if constexpr (kBeta) put(job.gradients.dbeta, dbeta);
}

// Rows of any length: sums for gamma and beta are kept in memory.
template <typename T>
__global__ void __launch_bounds__(kMostThreads) BackwardOfLongRows(const BackwardJob job) {
  __shared__ BlockSums<float2>::Shared sums_of_warps;
  BlockSums<float2> sum_over_block(sums_of_warps);
  const Inputs& inputs = job.inputs;
  const int64_t partials = job.gradients.partials, example = blockIdx.x / partials, partial = blockIdx.x % partials;
  const int64_t cols = inputs.cols;
  const float* const gamma = inputs.gamma + example * cols;
  float* const dgamma = job.gradients.dgamma + blockIdx.x * cols;
  float* const dbeta = job.gradients.dbeta ? job.gradients.dbeta + blockIdx.x * cols : nullptr;
  WaitForPrimary();
  for (int64_t col = threadIdx.x; col < cols; col += blockDim.x) {
    dgamma[col] = 0.0f;
    if (dbeta) dbeta[col] = 0.0f;
  }
  for (int64_t r = partial; r < inputs.rows; r += partials) {
    const int64_t row = example * inputs.rows + r;
    const T* const x = static_cast<const T*>(inputs.x) + row * cols;
    const T* const dys = static_cast<const T*>(job.dy) + row * cols;
    const float mean = job.statistics.mean ? job.statistics.mean[row] : 0.0f, rstd = job.statistics.rstd[row];
    float2 sums = {};
    for (int64_t col = threadIdx.x; col < cols; col += blockDim.x) {
      const float unit = (ToFloat(x[col]) - mean) * rstd, dy = ToFloat(dys[col]), weighted = dy * gamma[col];
      sums.x = fmaf(weighted, unit, sums.x);
      sums.y += weighted;
      dgamma[col] = fmaf(dy, unit, dgamma[col]);
      if (dbeta) dbeta[col] += dy;
    }
    sums = sum_over_block(sums);
    const float of_unit = sums.x / cols, of_one = inputs.centered ? sums.y / cols : 0.0f;
    for (int64_t col = threadIdx.x; col < cols; col += blockDim.x) {
      const float unit = (ToFloat(x[col]) - mean) * rstd, weighted = ToFloat(dys[col]) * gamma[col];
      const float dsum = job.dsum ? ToFloat(static_cast<const T*>(job.dsum)[row * cols + col]) : 0.0f;
      static_cast<T*>(job.gradients.dx)[row * cols + col] =
          FromFloat<T>(fmaf(rstd, weighted - of_one - unit * of_unit, dsum));
    }
  }
}

template <typename T>
Status LaunchBackward(cudaStream_t stream, const BackwardJob& job) {
  const Gradients& gradients = job.gradients;
  const int64_t vectors = VectorsPerRow<T>(
      job.inputs.cols, {job.inputs.x, job.dy, job.dsum, gradients.dx, gradients.dgamma, gradients.dbeta});
  auto with = [&]<bool kBeta>() {
    const Selected<BackwardJob> selected(vectors,
                                         {{BackwardOfRows<T, 1, kBeta>, 1, 512},
                                          {BackwardOfRows<T, 2, kBeta>, 2, 512},
                                          {BackwardOfRows<T, 4, kBeta>, 4, 512}},
                                         BackwardOfLongRows<T>, 512);
    return Check(LaunchAsDependent(selected.kernel, static_cast<unsigned>(job.inputs.count * gradients.partials),
                                   selected.threads, 0, stream, job),
                 "kernel launch");
  };
  return gradients.dbeta ? with.template operator()<true>() : with.template operator()<false>();
}

}  // namespace

Status Backward(const Executor& executor, const Inputs& inputs, const Statistics& statistics, const void* dy,
                const void* dsum, const Gradients& gradients) {
  if (Status s = CheckSize(inputs); !s.ok()) return s;
  auto* launch = inputs.dtype == DType::kFloat32 ? LaunchBackward<float> : LaunchBackward<__nv_bfloat16>;
  return launch(executor.stream, {inputs, statistics, dy, dsum, gradients});
}

}  // namespace te::norm
