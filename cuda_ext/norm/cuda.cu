// A thread block has a row in registers: it is read once, reduced, and normalized. Sums of rows, of one thread's values
// and then of all threads', have a fixed order.
//
// Bytes per bfloat16 value: 3 for FP8 in rows (7 with a residual: x and it are read, their sum is written), 2 for
// statistics and the amax alone; 3 or 4 more for a transposed copy or both from known statistics, tile by tile
// (quantize/computed_tile.cuh); 6 backward, 8 with the gradient of the sum. At 8192 × 4096 values and 3.0 TB/s (H100)
// that is 34 (78), 22, 34, 45, 67 and 89 µs. Arithmetic is far below that.
//
// Backward, a block takes rows in turn, so that it can add up the gradients of gamma and beta in registers; the next
// row is on its way meanwhile.

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
#include "quantize/computed_tile.cuh"

namespace te::norm {
namespace {

using quantize::AtomicMax;
using quantize::Clear;
using quantize::Encode;
using quantize::kBlock;
using quantize::kWholeWarp;
using quantize::Words;

inline constexpr int kForwardThreads = 256, kBackwardThreads = 512;
inline constexpr int kMostWarps = kBackwardThreads / 32;

// The same bits wherever it is computed.
__device__ __forceinline__ float Normalized(float s, float mean, float rstd, float gamma, const float* beta) {
  const float unit = __fmul_rn(__fsub_rn(s, mean), rstd);
  return beta ? __fmaf_rn(unit, gamma, *beta) : __fmul_rn(unit, gamma);
}

// Sums over a thread block, of which every thread gets the result. Calls alternate between two parts of `shared`, so
// that one barrier a call is enough.
class BlockSums {
 public:
  __device__ explicit BlockSums(float2 (*shared)[kMostWarps]) : shared_(shared) {}

  __device__ __forceinline__ float2 operator()(float2 x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      x.x += __shfl_xor_sync(kWholeWarp, x.x, mask);
      x.y += __shfl_xor_sync(kWholeWarp, x.y, mask);
    }
    float2* const of_warps = shared_[turn_];
    turn_ ^= 1;
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    float2 sum = of_warps[0];
    for (int warp = 1; warp < blockDim.x / 32; ++warp) {
      sum.x += of_warps[warp].x;
      sum.y += of_warps[warp].y;
    }
    return sum;
  }

  __device__ __forceinline__ float operator()(float x) { return (*this)(make_float2(x, 0.0f)).x; }

 private:
  float2 (*shared_)[kMostWarps];
  int turn_ = 0;
};

struct Job {
  Inputs inputs;
  Outputs outputs;
};

__device__ __forceinline__ float ScaleFor(Fp8 format, float amax, bool power_of_two) {
  return format == Fp8::kE4M3 ? ScaleOf<E4M3>(amax, power_of_two) : ScaleOf<E5M2>(amax, power_of_two);
}

__device__ __forceinline__ uint32_t EncodeAs(Fp8 format, const float (&x)[4], float scale, bool special) {
  const float scales[4] = {scale, scale, scale, scale};
  return format == Fp8::kE4M3 ? Encode<E4M3>(x, scales, special) : Encode<E5M2>(x, scales, special);
}

// Of a tensor, once for all of its rows.
__device__ __forceinline__ float ScaleOfTensor(const Outputs& outputs, int64_t example, bool first_row) {
  const float amax = outputs.reference_amax[example];
  const float scale = ScaleFor(outputs.format, amax, outputs.power_of_two_scales);
  if (first_row && threadIdx.x == 0) outputs.scale_inv[example] = ScaleInvOf(amax, scale);
  return scale;
}

__device__ __forceinline__ void PutStatistics(const Statistics& statistics, int64_t row, float mean, float rstd) {
  if (threadIdx.x != 0) return;
  if (statistics.mean) statistics.mean[row] = mean;
  if (statistics.rstd) statistics.rstd[row] = rstd;
}

// Raises the amax of a tensor to the largest magnitude, as the word of a thread, that a block has seen.
template <typename T>
__device__ __forceinline__ void RaiseAmax(float* amax, uint32_t largest, uint32_t* of_warps) {
  const uint32_t of_warp = __reduce_max_sync(kWholeWarp, largest);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const uint32_t of_block = __reduce_max_sync(kWholeWarp, threadIdx.x < blockDim.x / 32 ? of_warps[threadIdx.x] : 0);
  const uint32_t bits = Words<T>::FloatBitsOf(of_block);
  if (threadIdx.x == 0 && bits > *reinterpret_cast<volatile const uint32_t*>(amax)) AtomicMax(amax, bits);
}

// ------------------------------------------------------------------------------------------------------------- forward

// A row in registers: kVectors 16-byte vectors a thread.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kForwardThreads) NormalizeRows(const Job job) {
  using W = Words<T>;
  constexpr int kCount = W::kPerVector;
  constexpr int kLanes = kBlock / kCount;  // that share a block of 128 values
  __shared__ float2 sums_of_warps[2][kMostWarps];
  __shared__ uint32_t amax_of_warps[kMostWarps];
  BlockSums sum_over_block(sums_of_warps);
  const Inputs& inputs = job.inputs;
  const Outputs& outputs = job.outputs;
  const T* const type = nullptr;
  const int64_t row = blockIdx.x, example = row / inputs.rows;
  const int vectors = static_cast<int>(inputs.cols / kCount);
  WaitForPrimary();

  uint4 bits[kVectors];
  const uint4* const from = static_cast<const uint4*>(inputs.x) + row * vectors;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * blockDim.x + threadIdx.x;
    bits[i] = v < vectors ? LoadStreaming(from + v) : make_uint4(0, 0, 0, 0);
  }
  if (inputs.residual) {
    const uint4* const residual = static_cast<const uint4*>(inputs.residual) + row * vectors;
    uint4* const to = static_cast<uint4*>(outputs.sum) + row * vectors;
    uint4 more[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = i * blockDim.x + threadIdx.x;
      more[i] = v < vectors ? LoadStreaming(residual + v) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = i * blockDim.x + threadIdx.x;
      float a[kCount], b[kCount];
      Unpack(bits[i], a, type);
      Unpack(more[i], b, type);
#pragma unroll
      for (int j = 0; j < kCount; ++j) a[j] += b[j];
      bits[i] = Pack(a, type);
      if (v < vectors) to[v] = bits[i];
    }
  }

  float mean = 0.0f;
  if (inputs.centered) {
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
    for (int j = 0; j < kCount; ++j) squares = fmaf(s[j] - mean, s[j] - mean, squares);
  }
  const float rstd = rsqrtf(sum_over_block(squares) / inputs.cols + inputs.epsilon);
  PutStatistics(outputs.statistics, row, mean, rstd);
  if (!outputs.data && !outputs.amax) return;

  const bool in_blocks = outputs.data && !outputs.reference_amax;
  float scale = 1.0f;
  if (outputs.data && !in_blocks) scale = ScaleOfTensor(outputs, example, row % inputs.rows == 0);
  const float* const gamma = inputs.gamma + example * inputs.cols;
  const float* const beta = inputs.beta ? inputs.beta + example * inputs.cols : nullptr;
  const int64_t blocks = (inputs.cols + kBlock - 1) / kBlock;
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = i * blockDim.x + threadIdx.x;
    float y[kCount] = {};
    if (v < vectors) {
      float s[kCount];
      Unpack(bits[i], s, type);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const int col = v * kCount + j;
        y[j] = Normalized(s[j], mean, rstd, gamma[col], beta ? beta + col : nullptr);
      }
    }
    const uint4 rounded = Pack(y, type);
    Unpack(rounded, y, type);
    const uint32_t low = W::Max(W::Magnitudes(rounded.x), W::Magnitudes(rounded.y));
    const uint32_t high = W::Max(W::Magnitudes(rounded.z), W::Magnitudes(rounded.w));
    uint32_t magnitude = W::Single(W::Max(low, high));
    largest = max(largest, magnitude);
    if (!outputs.data) continue;
    const bool special = W::FloatBitsOf(magnitude) >= kFloatInfinityBits;
    if (in_blocks) {
#pragma unroll
      for (int mask = kLanes / 2; mask > 0; mask /= 2) {
        magnitude = max(magnitude, __shfl_xor_sync(kWholeWarp, magnitude, mask));
      }
      const float amax = __uint_as_float(W::FloatBitsOf(magnitude));
      scale = ScaleFor(outputs.format, amax, outputs.power_of_two_scales);
      if (v % kLanes == 0 && v < vectors) {
        outputs.scale_inv[(example * blocks + v / kLanes) * inputs.rows + row % inputs.rows] = ScaleInvOf(amax, scale);
      }
    }
    if (v >= vectors) continue;
    uint32_t codes[kCount / 4];
#pragma unroll
    for (int h = 0; h < kCount / 4; ++h) {
      const float four[4] = {y[4 * h], y[4 * h + 1], y[4 * h + 2], y[4 * h + 3]};
      codes[h] = EncodeAs(outputs.format, four, scale, special);
    }
    uint8_t* const to = outputs.data + row * inputs.cols + v * kCount;
    if constexpr (kCount == 8) {
      *reinterpret_cast<uint2*>(to) = make_uint2(codes[0], codes[1]);
    } else {
      *reinterpret_cast<uint32_t*>(to) = codes[0];
    }
  }
  if (outputs.amax) RaiseAmax<T>(outputs.amax + example, largest, amax_of_warps);
}

// A row of any length, which is read from memory again for each reduction. A warp takes 128 values at a time.
template <typename T>
__global__ void __launch_bounds__(kForwardThreads) NormalizeLongRows(const Job job) {
  using W = Words<T>;
  __shared__ float2 sums_of_warps[2][kMostWarps];
  __shared__ uint32_t amax_of_warps[kMostWarps];
  BlockSums sum_over_block(sums_of_warps);
  const Inputs& inputs = job.inputs;
  const Outputs& outputs = job.outputs;
  const int64_t row = blockIdx.x, example = row / inputs.rows, cols = inputs.cols;
  WaitForPrimary();
  const T* s = static_cast<const T*>(inputs.x) + row * cols;
  if (inputs.residual) {
    const T* const residual = static_cast<const T*>(inputs.residual) + row * cols;
    T* const to = static_cast<T*>(outputs.sum) + row * cols;
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
  const float rstd = rsqrtf(sum_over_block(squares) / cols + inputs.epsilon);
  PutStatistics(outputs.statistics, row, mean, rstd);
  if (!outputs.data && !outputs.amax) return;

  const bool in_blocks = outputs.data && !outputs.reference_amax;
  float scale = 1.0f;
  if (outputs.data && !in_blocks) scale = ScaleOfTensor(outputs, example, row % inputs.rows == 0);
  const float* const gamma = inputs.gamma + example * cols;
  const float* const beta = inputs.beta ? inputs.beta + example * cols : nullptr;
  const int64_t blocks = (cols + kBlock - 1) / kBlock;
  const int lane = threadIdx.x % 32;
  uint32_t largest = 0;
  for (int64_t block = threadIdx.x / 32; block < blocks; block += blockDim.x / 32) {
    float y[4] = {};
    uint32_t magnitude = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t col = block * kBlock + j * 32 + lane;
      if (col >= cols) continue;
      const T rounded = FromFloat<T>(Normalized(ToFloat(s[col]), mean, rstd, gamma[col], beta ? beta + col : nullptr));
      uint32_t word = 0;
      memcpy(&word, &rounded, sizeof(T));
      magnitude = max(magnitude, W::Magnitudes(word));
      y[j] = ToFloat(rounded);
    }
    largest = max(largest, magnitude);
    if (!outputs.data) continue;
    const bool special = W::FloatBitsOf(magnitude) >= kFloatInfinityBits;
    if (in_blocks) {
      const float amax = __uint_as_float(W::FloatBitsOf(__reduce_max_sync(kWholeWarp, magnitude)));
      scale = ScaleFor(outputs.format, amax, outputs.power_of_two_scales);
      if (lane == 0)
        outputs.scale_inv[(example * blocks + block) * inputs.rows + row % inputs.rows] = ScaleInvOf(amax, scale);
    }
    const uint32_t codes = EncodeAs(outputs.format, y, scale, special);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t col = block * kBlock + j * 32 + lane;
      if (col < cols) outputs.data[row * cols + col] = static_cast<uint8_t>(codes >> (8 * j));
    }
  }
  if (outputs.amax) RaiseAmax<T>(outputs.amax + example, largest, amax_of_warps);
}

// What ComputeTiles runs: y from x, in place.
struct NormalizeTile {
  Inputs inputs;
  Statistics statistics;

  template <typename T>
  __device__ __forceinline__ void operator()(const quantize::Tile& tile, const quantize::Place<T>& place,
                                             quantize::Slot<T>* slots) const {
    using W = Words<T>;
    constexpr int kCount = W::kPerVector;
    const T* const type = nullptr;
    const float* const of_gamma = inputs.gamma + tile.example * inputs.cols;
    const float* const of_beta = inputs.beta ? inputs.beta + tile.example * inputs.cols : nullptr;
#pragma unroll
    for (int v = 0; v < W::kVectors; ++v) {
      float gamma[kCount], beta[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const int col = place.Column(v * kCount + j);
        gamma[j] = col < inputs.cols ? of_gamma[col] : 0.0f;
        beta[j] = of_beta && col < inputs.cols ? of_beta[col] : 0.0f;
      }
#pragma unroll 2
      for (int r = 0; r < quantize::kPatch; ++r) {
        uint4& bits = slots[0].values[place.down * quantize::kPatch + r][v * quantize::kAcross + place.across];
        const int row = place.row + r;
        float y[kCount] = {};
        if (row < inputs.rows) {
          const int64_t index = tile.example * inputs.rows + row;
          const float mean = statistics.mean ? statistics.mean[index] : 0.0f, rstd = statistics.rstd[index];
          float s[kCount];
          Unpack(bits, s, type);
#pragma unroll
          for (int j = 0; j < kCount; ++j) {
            const bool inside = place.Column(v * kCount + j) < inputs.cols;
            y[j] = inside ? Normalized(s[j], mean, rstd, gamma[j], of_beta ? &beta[j] : nullptr) : 0.0f;
          }
        }
        bits = Pack(y, type);
      }
    }
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
__global__ void __launch_bounds__(kBackwardThreads) BackwardOfRows(const BackwardJob job) {
  constexpr int kCount = Words<T>::kPerVector;
  __shared__ float2 sums_of_warps[2][kMostWarps];
  BlockSums sum_over_block(sums_of_warps);
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
__global__ void __launch_bounds__(kBackwardThreads) BackwardOfLongRows(const BackwardJob job) {
  __shared__ float2 sums_of_warps[2][kMostWarps];
  BlockSums sum_over_block(sums_of_warps);
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

// Launches the kernel that has enough vectors a thread, or the one for long rows.
template <int kMostThreads, typename Job>
Status LaunchRows(cudaStream_t stream, int64_t blocks, int64_t vectors, const Job& job,
                  const std::type_identity_t<void (*)(Job)> (&by_vectors)[4],
                  std::type_identity_t<void (*)(Job)> long_rows) {
  auto* kernel = long_rows;
  int64_t threads = kMostThreads;
  for (int i = 0; i < 4 && vectors > 0; ++i) {
    if (vectors > int64_t{kMostThreads} << i || by_vectors[i] == nullptr) continue;
    kernel = by_vectors[i];
    threads = (((vectors + (1 << i) - 1) >> i) + 31) / 32 * 32;
    break;
  }
  return Check(LaunchAsDependent(kernel, static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, stream, job),
               "kernel launch");
}

template <typename T>
Status LaunchForward(cudaStream_t stream, const Job& job) {
  const Inputs& inputs = job.inputs;
  const int64_t vectors = VectorsPerRow<T>(inputs.cols, {inputs.x, inputs.residual, job.outputs.sum, job.outputs.data});
  return LaunchRows<kForwardThreads>(
      stream, inputs.count * inputs.rows, vectors, job,
      {NormalizeRows<T, 1>, NormalizeRows<T, 2>, NormalizeRows<T, 4>, NormalizeRows<T, 8>}, NormalizeLongRows<T>);
}

template <typename T>
Status LaunchBackward(cudaStream_t stream, const BackwardJob& job) {
  const Gradients& gradients = job.gradients;
  const int64_t vectors = VectorsPerRow<T>(
      job.inputs.cols, {job.inputs.x, job.dy, job.dsum, gradients.dx, gradients.dgamma, gradients.dbeta});
  auto with = [&]<bool kBeta>() {
    return LaunchRows<kBackwardThreads>(
        stream, job.inputs.count * gradients.partials, vectors, job,
        {BackwardOfRows<T, 1, kBeta>, BackwardOfRows<T, 2, kBeta>, BackwardOfRows<T, 4, kBeta>, nullptr},
        BackwardOfLongRows<T>);
  };
  return gradients.dbeta ? with.template operator()<true>() : with.template operator()<false>();
}

template <typename Scaling>
Status NormalizedIn(const Executor& executor, const Inputs& inputs, const Statistics& statistics,
                    const quantize::Copies& copies, const Scaling& scaling) {
  quantize::TileLaunch launch({inputs.dtype, inputs.x, inputs.count, inputs.rows, inputs.cols}, {inputs.x});
  launch.Add(0, copies, scaling);
  return launch.Run<3>(executor.stream, NormalizeTile{inputs, statistics});
}

}  // namespace

Status Normalize(const Executor& executor, const Inputs& inputs, const Outputs& outputs) {
  if (Status s = CheckSize(inputs); !s.ok()) return s;
  if (outputs.amax) {
    if (Status s = Clear(executor.stream, {outputs.amax, inputs.count}); !s.ok()) return s;
  }
  auto* launch = inputs.dtype == DType::kFloat32    ? LaunchForward<float>
                 : inputs.dtype == DType::kBFloat16 ? LaunchForward<__nv_bfloat16>
                                                    : LaunchForward<__half>;
  return launch(executor.stream, {inputs, outputs});
}

Status NormalizedInTensor(const Executor& executor, const Inputs& inputs, const Statistics& statistics,
                          const quantize::Copies& copies, const quantize::TensorScaling& scaling) {
  return NormalizedIn(executor, inputs, statistics, copies, scaling);
}

Status NormalizedInBlocks(const Executor& executor, const Inputs& inputs, const Statistics& statistics,
                          const quantize::Copies& copies, const quantize::BlockScaling& scaling) {
  return NormalizedIn(executor, inputs, statistics, copies, scaling);
}

Status Backward(const Executor& executor, const Inputs& inputs, const Statistics& statistics, const void* dy,
                const void* dsum, const Gradients& gradients) {
  if (Status s = CheckSize(inputs); !s.ok()) return s;
  auto* launch = inputs.dtype == DType::kFloat32    ? LaunchBackward<float>
                 : inputs.dtype == DType::kBFloat16 ? LaunchBackward<__nv_bfloat16>
                                                    : LaunchBackward<__half>;
  return launch(executor.stream, {inputs, statistics, dy, dsum, gradients});
}

}  // namespace te::norm
