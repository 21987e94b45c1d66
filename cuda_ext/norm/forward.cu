// A thread block takes rows in turn, and has each in registers: it is read once, reduced, and normalized, while the
// next one is on its way. Sums of rows, of one thread's values and then of all threads', have a fixed order.
//
// Bytes per bfloat16 value: 3 for FP8 in rows (7 with a residual: x and it are read, their sum is written), 2 for
// statistics, with the amax or without it. At 8192 × 4096 values and 3.0 TB/s (H100) that is 34 (78) and 22 µs.
// Arithmetic is far below that.

#include <algorithm>
#include <cstdint>

#include "common/cuda_status.h"
#include "common/dependent_launch.cuh"
#include "common/vector.cuh"
#include "norm/norm.h"
#include "norm/normalized.cuh"
#include "norm/rows.cuh"
#include "quantize/amax.cuh"
#include "quantize/rows.cuh"

namespace te::norm {
namespace {

// A row whose squares overflow is NaN, since 0 · ∞ is: 1 / √∞ would hide it as zeros, with gradients of zero.
__device__ __forceinline__ float ReciprocalDeviation(float variance, float epsilon) {
  const float sum = variance + epsilon;
  return __fmaf_rn(0.0f, sum, rsqrtf(sum));
}

struct Job {
  Inputs inputs;
  void* sum;
  Statistics statistics;
  quantize::RowOutputs rows;
  int64_t blocks;  // for each of the matrices
};

template <int kCount>
__device__ __forceinline__ void LoadFloats(const float* from, float (&to)[kCount]) {
#pragma unroll
  for (int j = 0; j < kCount; j += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + j);
    to[j] = four.x, to[j + 1] = four.y, to[j + 2] = four.z, to[j + 3] = four.w;
  }
}

__device__ __forceinline__ void PutStatistics(const Statistics& statistics, int64_t row, float mean, float rstd) {
  if (threadIdx.x != 0) return;
  if (statistics.mean) statistics.mean[row] = mean;
  if (statistics.rstd) statistics.rstd[row] = rstd;
}

// Threads of a multiprocessor for which registers are left, with so many vectors a thread.
constexpr int ResidentThreads(int vectors) { return vectors == 1 ? 1024 : vectors == 2 ? 768 : 512; }

// One row of x and of the residual in registers.
template <int kVectors>
struct ForwardRow {
  uint4 x[kVectors];
  uint4 residual[kVectors];
};

template <int kVectors>
__device__ __forceinline__ void LoadRow(const Inputs& inputs, int64_t row, int vectors, ForwardRow<kVectors>& to) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * blockDim.x + threadIdx.x;
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    const int64_t at = row * vectors + v;
    to.x[i] = v < vectors ? LoadStreaming(static_cast<const uint4*>(inputs.x) + at) : zeros;
    to.residual[i] =
        inputs.residual && v < vectors ? LoadStreaming(static_cast<const uint4*>(inputs.residual) + at) : zeros;
  }
}

// Rows of kVectors 16-byte vectors a thread. Instructions bound it: with kCentered false there is no mean and no beta.
template <typename T, int kVectors, int kThreads, bool kCentered>
__global__ void __launch_bounds__(kThreads, ResidentThreads(kVectors) / kThreads)
    NormalizeRows(const __grid_constant__ Job job) {
  using W = quantize::Words<T>;
  constexpr int kCount = W::kPerVector;
  __shared__ BlockSums<float>::Shared sums_of_warps;
  __shared__ uint32_t amax_of_warps[32];
  BlockSums<float> sum_over_block(sums_of_warps);
  const Inputs& inputs = job.inputs;
  const T* const type = nullptr;
  const int64_t example = blockIdx.x / job.blocks, first = blockIdx.x % job.blocks;
  const int vectors = static_cast<int>(inputs.cols / kCount);
  const float* const of_gamma = inputs.gamma + example * inputs.cols;
  const float* const of_beta = kCentered && inputs.beta ? inputs.beta + example * inputs.cols : nullptr;
  const bool with_y = job.rows.data || job.rows.amax;
  WaitForPrimary();
  quantize::RowEncoder<T> encode(job.rows, example, inputs.rows, inputs.cols, first == 0);
  float gamma[kVectors][kCount];
  ForwardRow<kVectors> next;
  LoadRow(inputs, example * inputs.rows + first, vectors, next);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * blockDim.x + threadIdx.x;
    if (with_y && v < vectors) LoadFloats(of_gamma + v * kCount, gamma[i]);
  }
  for (int64_t r = first; r < inputs.rows; r += job.blocks) {
    const int64_t row = example * inputs.rows + r;
    ForwardRow<kVectors> current = next;
    if (r + job.blocks < inputs.rows) LoadRow(inputs, row + job.blocks, vectors, next);
    uint4(&bits)[kVectors] = current.x;
    if (inputs.residual) {
      uint4* const to = static_cast<uint4*>(job.sum) + row * vectors;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int v = i * blockDim.x + threadIdx.x;
        float a[kCount], b[kCount];
        Unpack(bits[i], a, type);
        Unpack(current.residual[i], b, type);
#pragma unroll
        for (int j = 0; j < kCount; ++j) a[j] += b[j];
        bits[i] = Pack(a, type);
        if (v < vectors) to[v] = bits[i];
      }
    }

    float mean = 0.0f;
    if (kCentered && inputs.centered) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float s[kCount];
        Unpack(bits[i], s, type);
#pragma unroll
        for (int j = 0; j < kCount; ++j) sum += s[j];
      }
      mean = sum_over_block(sum) / inputs.cols;
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x) >= vectors) continue;
      float s[kCount];
      Unpack(bits[i], s, type);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float from_mean = kCentered ? s[j] - mean : s[j];
        squares = fmaf(from_mean, from_mean, squares);
      }
    }
    const float rstd = ReciprocalDeviation(sum_over_block(squares) / inputs.cols, inputs.epsilon);
    PutStatistics(job.statistics, row, mean, rstd);
    if (!with_y) continue;

#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = i * blockDim.x + threadIdx.x;
      float y[kCount] = {};
      if (v < vectors) {
        float s[kCount], beta[kCount];
        Unpack(bits[i], s, type);
        if (of_beta) LoadFloats(of_beta + v * kCount, beta);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          const float* const b = kCentered && of_beta ? &beta[j] : nullptr;
          y[j] = Normalized(s[j], kCentered ? mean : 0.0f, rstd, gamma[i][j], b);
        }
      }
      encode(r, v, v < vectors ? kCount : 0, y);
    }
  }
  encode.RaiseAmax(amax_of_warps);
}

// A row of any length and alignment, which is read from memory again for each reduction.
template <typename T>
__global__ void __launch_bounds__(kMostThreads) NormalizeLongRows(const __grid_constant__ Job job) {
  constexpr int kCount = kPer16Bytes<T>;
  __shared__ BlockSums<float>::Shared sums_of_warps;
  __shared__ uint32_t amax_of_warps[32];
  BlockSums<float> sum_over_block(sums_of_warps);
  const Inputs& inputs = job.inputs;
  const int64_t row = blockIdx.x, example = row / inputs.rows, cols = inputs.cols;
  WaitForPrimary();
  const T* s = static_cast<const T*>(inputs.x) + row * cols;
  if (inputs.residual) {
    const T* const residual = static_cast<const T*>(inputs.residual) + row * cols;
    T* const to = static_cast<T*>(job.sum) + row * cols;
    for (int64_t col = threadIdx.x; col < cols; col += blockDim.x) {
      to[col] = FromFloat<T>(ToFloat(s[col]) + ToFloat(residual[col]));
    }
    s = to;
    __syncthreads();
  }
  float mean = 0.0f;
  if (inputs.centered) {
    float sum = 0.0f;
    for (int64_t col = threadIdx.x; col < cols; col += blockDim.x) sum += ToFloat(s[col]);
    mean = sum_over_block(sum) / cols;
  }
  float squares = 0.0f;
  for (int64_t col = threadIdx.x; col < cols; col += blockDim.x) {
    const float from_mean = ToFloat(s[col]) - mean;
    squares = fmaf(from_mean, from_mean, squares);
  }
  const float rstd = ReciprocalDeviation(sum_over_block(squares) / cols, inputs.epsilon);
  PutStatistics(job.statistics, row, mean, rstd);
  if (!job.rows.data && !job.rows.amax) return;

  quantize::RowEncoder<T> encode(job.rows, example, inputs.rows, cols, row % inputs.rows == 0);
  const float* const gamma = inputs.gamma + example * cols;
  const float* const beta = inputs.beta ? inputs.beta + example * cols : nullptr;
  for (int64_t col = int64_t{threadIdx.x} * kCount; col - threadIdx.x % 32 * kCount < cols;
       col += blockDim.x * kCount) {
    const int count = static_cast<int>(cols - col < kCount ? cols - col : kCount);
    float y[kCount] = {};
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (j >= count) continue;
      y[j] = Normalized(ToFloat(s[col + j]), mean, rstd, gamma[col + j], beta ? beta + col + j : nullptr);
    }
    encode(row % inputs.rows, static_cast<int>(col / kCount), count, y);
  }
  encode.RaiseAmax(amax_of_warps);
}

template <typename T>
Status LaunchForward(cudaStream_t stream, Job job) {
  const Inputs& inputs = job.inputs;
  const int64_t vectors =
      VectorsPerRow<T>(inputs.cols, {inputs.x, inputs.residual, inputs.gamma, inputs.beta, job.sum, job.rows.data});
  auto with = [&]<bool kCentered>() {
    const Selected<Job> selected(vectors,
                                 {{NormalizeRows<T, 1, 256, kCentered>, 1, 256},
                                  {NormalizeRows<T, 2, 256, kCentered>, 2, 256},
                                  {NormalizeRows<T, 4, 256, kCentered>, 4, 256},
                                  {NormalizeRows<T, 4, 512, kCentered>, 4, 512}},
                                 NormalizeLongRows<T>, 256);
    job.blocks = inputs.rows;
    if (selected.vectors_per_thread > 0) {
      int multiprocessors = 0;
      if (Status s = CountMultiprocessors(&multiprocessors); !s.ok()) return s;
      const int64_t resident = std::min(32u, ResidentThreads(selected.vectors_per_thread) / selected.threads);
      job.blocks = std::min(inputs.rows, std::max<int64_t>(1, multiprocessors * resident / inputs.count));
    }
    return Check(LaunchAsDependent(selected.kernel, static_cast<unsigned>(inputs.count * job.blocks), selected.threads,
                                   0, stream, job),
                 "kernel launch");
  };
  return inputs.centered || inputs.beta ? with.template operator()<true>() : with.template operator()<false>();
}

}  // namespace

Status Normalize(const Executor& executor, const Inputs& inputs, const Outputs& outputs) {
  if (Status s = CheckSize(inputs); !s.ok()) return s;
  if (outputs.rows.amax) {
    if (Status s = quantize::Clear(executor.stream, {outputs.rows.amax, inputs.count}); !s.ok()) return s;
  }
  auto* launch = inputs.dtype == DType::kFloat32 ? LaunchForward<float> : LaunchForward<__nv_bfloat16>;
  return launch(executor.stream, {inputs, outputs.sum, outputs.statistics, outputs.rows, 0});
}

}  // namespace te::norm
