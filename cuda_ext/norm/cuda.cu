// A thread block takes rows in turn, and has each in registers: it is read once, reduced, and normalized, while the
// next one is on its way. Sums of rows, of one thread's values and then of all threads', have a fixed order.
//
// Bytes per bfloat16 value: 3 for FP8 in rows (7 with a residual: x and it are read, their sum is written), 2 for
// statistics, with the amax or without it; 3 or 4 more for a transposed copy or both from known statistics, by the
// quantizing kernel (quantize/kernel.cuh); 6 backward, 8 with the gradient of the sum. At 8192 × 4096 values and 3.0
// TB/s (H100) that is 34 (78), 22, 34, 45, 67 and 89 µs. Arithmetic is far below that.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "common/cuda_status.h"
#include "common/dependent_launch.cuh"
#include "common/vector.cuh"
#include "norm/norm.h"
#include "quantize/amax.cuh"
#include "quantize/launch.cuh"
#include "quantize/rows.cuh"

namespace te::norm {
namespace {

using quantize::Clear;
using quantize::kBlock;
using quantize::kWholeWarp;
using quantize::Words;

inline constexpr int kMostThreads = 512, kMostWarps = kMostThreads / 32;

// The same bits wherever it is computed.
__device__ __forceinline__ float Normalized(float s, float mean, float rstd, float gamma, const float* beta) {
  const float unit = __fmul_rn(s - mean, rstd);
  return beta ? __fmaf_rn(unit, gamma, *beta) : __fmul_rn(unit, gamma);
}

// A row whose squares overflow is NaN, since 0 · ∞ is: 1 / √∞ would hide it as zeros, with gradients of zero.
__device__ __forceinline__ float ReciprocalDeviation(float variance, float epsilon) {
  const float sum = variance + epsilon;
  return __fmaf_rn(0.0f, sum, rsqrtf(sum));
}

__device__ __forceinline__ float Shuffled(float x, int mask) { return __shfl_xor_sync(kWholeWarp, x, mask); }
__device__ __forceinline__ float2 Shuffled(float2 x, int mask) {
  return make_float2(Shuffled(x.x, mask), Shuffled(x.y, mask));
}
__device__ __forceinline__ float Sum(float x, float y) { return x + y; }
__device__ __forceinline__ float2 Sum(float2 x, float2 y) { return make_float2(x.x + y.x, x.y + y.y); }

// Sums over a thread block, of which every thread gets the result. Calls alternate between two parts of `shared`, so
// that one barrier a call is enough.
template <typename V>
class BlockSums {
 public:
  using Shared = V[2][kMostWarps];

  __device__ explicit BlockSums(Shared& shared) : shared_(shared) {}

  __device__ __forceinline__ V operator()(V x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x = Sum(x, Shuffled(x, mask));
    V* const of_warps = shared_[turn_];
    turn_ ^= 1;
    const int lane = threadIdx.x % 32;
    if (lane == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    const int warp = lane % kMostWarps;
    x = warp < blockDim.x / 32 ? of_warps[warp] : V{};
#pragma unroll
    for (int mask = kMostWarps / 2; mask > 0; mask /= 2) x = Sum(x, Shuffled(x, mask));
    return x;
  }

 private:
  Shared& shared_;
  int turn_ = 0;
};

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

// ------------------------------------------------------------------------------------------------------------- forward

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
  using W = Words<T>;
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

// What the quantizing kernel makes of a patch of x: y. It reads statistics and gamma while x is on its way.
struct NormalizePatch {
  Inputs inputs;
  Statistics statistics;

  template <typename T>
  struct Of {
    const float* of_beta;  // of the patch's example
    int rows, cols;        // of the matrix
    float gamma[quantize::kPatch];
    float mean[quantize::kPatch], rstd[quantize::kPatch];

    __device__ __forceinline__ void operator()(const quantize::Place<T>& place, quantize::Patch<T>& patch) const {
      using W = Words<T>;
      constexpr int kCount = W::kPerVector;
#pragma unroll
      for (int v = 0; v < W::kVectors; ++v) {
        float beta[kCount];
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          const int col = place.Column(v * kCount + j);
          beta[j] = of_beta && col < cols ? of_beta[col] : 0.0f;
        }
#pragma unroll
        for (int r = 0; r < quantize::kPatch; ++r) {
          float y[kCount];
#pragma unroll
          for (int j = 0; j < kCount; ++j) {
            const bool inside = place.row + r < rows && place.Column(v * kCount + j) < cols;
            const float s = quantize::Value<T>(patch[r], v * kCount + j);
            y[j] = inside ? Normalized(s, mean[r], rstd[r], gamma[v * kCount + j], of_beta ? &beta[j] : nullptr) : 0.0f;
          }
          quantize::SetVector<T>(patch, r, v, Pack(y, static_cast<const T*>(nullptr)));
        }
      }
    }
  };

  template <typename T>
  __device__ __forceinline__ Of<T> For(const quantize::Tile& tile, const quantize::Place<T>& place) const {
    Of<T> of{inputs.beta ? inputs.beta + tile.example * inputs.cols : nullptr, static_cast<int>(inputs.rows),
             static_cast<int>(inputs.cols)};
#pragma unroll
    for (int j = 0; j < quantize::kPatch; ++j) {
      const int col = place.Column(j), row = place.row + j;
      of.gamma[j] = col < of.cols ? inputs.gamma[tile.example * inputs.cols + col] : 0.0f;
      const int64_t index = tile.example * inputs.rows + row;
      of.mean[j] = statistics.mean && row < of.rows ? statistics.mean[index] : 0.0f;
      of.rstd[j] = row < of.rows ? statistics.rstd[index] : 0.0f;
    }
    return of;
  }
};

// ------------------------------------------------------------------------------------------------------------ backward

struct BackwardJob {
  Inputs inputs;
  Statistics statistics;
  const void* dy;
  const void* dsum;
  Gradients gradients;
};

// One row of x, dy and dsum in registers.
template <int kVectors>
struct GradientRow {
  uint4 x[kVectors];
  uint4 dy[kVectors];
  uint4 dsum[kVectors];
};

template <typename T, int kVectors>
__device__ __forceinline__ void LoadRow(const BackwardJob& job, int64_t row, int vectors, GradientRow<kVectors>& to) {
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
  constexpr int kCount = Words<T>::kPerVector;
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
    const float mean = job.statistics.mean ? job.statistics.mean[row] : 0.0f, rstd = job.statistics.rstd[row];
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

// ------------------------------------------------------------------------------------------------------------ launches

Status CheckSize(const Inputs& inputs) {
  const int64_t rows = inputs.count * inputs.rows;
  if (rows < INT32_MAX && inputs.cols < INT32_MAX) return Status::Ok();
  return Status::Failed("x has " + std::to_string(rows) + " rows of " + std::to_string(inputs.cols) +
                        " values; both must be below 2^31");
}

// The number of 16-byte vectors in a row; 0 where rows are not made of them.
template <typename T>
int64_t VectorsPerRow(int64_t cols, std::initializer_list<const void*> arrays) {
  const bool aligned = cols % kPer16Bytes<T> == 0 && std::all_of(arrays.begin(), arrays.end(), OnSixteenBytes);
  return aligned ? cols / kPer16Bytes<T> : 0;
}

// A kernel for rows of as many vectors as its threads can have.
template <typename Job>
struct Instance {
  void (*kernel)(Job);
  int vectors_per_thread, most_threads;
};

// The first that has enough, or the one for long rows; and its threads.
template <typename Job>
struct Selected {
  void (*kernel)(Job);
  int vectors_per_thread = 0;
  unsigned threads;

  Selected(int64_t vectors, std::initializer_list<Instance<Job>> instances, void (*long_rows)(Job), int long_threads)
      : kernel(long_rows), threads(long_threads) {
    for (const auto& [of_rows, per_thread, most] : instances) {
      if (vectors == 0 || vectors > int64_t{per_thread} * most) continue;
      kernel = of_rows;
      vectors_per_thread = per_thread;
      threads = static_cast<unsigned>(((vectors + per_thread - 1) / per_thread + 31) / 32 * 32);
      return;
    }
  }
};

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

Status Normalize(const Executor& executor, const Inputs& inputs, const Outputs& outputs) {
  if (Status s = CheckSize(inputs); !s.ok()) return s;
  if (outputs.rows.amax) {
    if (Status s = Clear(executor.stream, {outputs.rows.amax, inputs.count}); !s.ok()) return s;
  }
  auto* launch = inputs.dtype == DType::kFloat32 ? LaunchForward<float> : LaunchForward<__nv_bfloat16>;
  return launch(executor.stream, {inputs, outputs.sum, outputs.statistics, outputs.rows, 0});
}

Status NormalizedInTensor(const Executor& executor, const Inputs& inputs, const Statistics& statistics,
                          const quantize::Copies& copies, const quantize::TensorScaling& scaling) {
  const quantize::Matrices x{inputs.dtype, inputs.x, inputs.count, inputs.rows, inputs.cols};
  return quantize::LaunchQuantizeTensor(executor.stream, x, copies, scaling, NormalizePatch{inputs, statistics});
}

Status NormalizedInBlocks(const Executor& executor, const Inputs& inputs, const Statistics& statistics,
                          const quantize::Copies& copies, const quantize::BlockScaling& scaling) {
  const quantize::Matrices x{inputs.dtype, inputs.x, inputs.count, inputs.rows, inputs.cols};
  const NormalizePatch compute{inputs, statistics};
  using quantize::Mode, quantize::Scales;
  return copies.data && !scaling.data_128x128 ? quantize::LaunchQuantizeInMode<Mode<Scales::kBlocks, false, false>>(
                                                    executor.stream, x, copies, scaling, compute)
                                              : quantize::LaunchQuantizeInMode<Mode<Scales::kBlocks, true, false>>(
                                                    executor.stream, x, copies, scaling, compute);
}

Status Backward(const Executor& executor, const Inputs& inputs, const Statistics& statistics, const void* dy,
                const void* dsum, const Gradients& gradients) {
  if (Status s = CheckSize(inputs); !s.ok()) return s;
  auto* launch = inputs.dtype == DType::kFloat32 ? LaunchBackward<float> : LaunchBackward<__nv_bfloat16>;
  return launch(executor.stream, {inputs, statistics, dy, dsum, gradients});
}

}  // namespace te::norm
