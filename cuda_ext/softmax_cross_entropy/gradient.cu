// Gradient: one read and one write, elementwise. Every thread block takes a stretch of one row, whatever its length.
//
// Bytes per logit: twice its size. On an H200 (4.3 TB/s measured) 8192 × 128256 bfloat16 cannot take less than 0.98 ms.
// Every thread keeps kGradientUnroll 16-byte loads in flight, as in statistics.cu.

#include <algorithm>
#include <cstdint>

#include "common/vector.cuh"
#include "softmax_cross_entropy/cluster_launch.cuh"
#include "softmax_cross_entropy/row.cuh"
#include "softmax_cross_entropy/row_gradient.cuh"
#include "softmax_cross_entropy/softmax_cross_entropy.h"

namespace te::softmax_cross_entropy {
namespace {

constexpr int kGradientUnroll = 4;
constexpr int kGradientThreads = 1024;

template <typename T, bool kSoftcap>
__global__ void __launch_bounds__(kGradientThreads)
    GradientOnStretches(const T* logits, const int32_t* labels, int64_t rows, int64_t vocab, int64_t stride,
                        int64_t stretches, float softcap, Gradient gradient) {
  constexpr int kN = kPer16Bytes<T>;
  const float inverse_softcap = kSoftcap ? 1.0f / softcap : 0.0f;
  // blockDim.y rows, a stretch of blockDim.x · kGradientUnroll vectors of each.
  const int64_t rows_per_block = blockDim.y;
  const int64_t groups = (rows + rows_per_block - 1) / rows_per_block;
  for (int64_t item = blockIdx.x; item < groups * stretches; item += gridDim.x) {
    const int64_t index = item / stretches * rows_per_block + threadIdx.y;
    const int64_t stretch = item % stretches;
    if (index >= rows) continue;
    const float weight = gradient.weight[index];
    const RowTerms terms = TermsOf(gradient, gradient.lse[index], weight);
    const int64_t label = labels[index];
    const T* row = logits + index * stride;
    T* out = static_cast<T*>(gradient.out) + index * stride;
    const Split<T> split(row, vocab);
    const uint4* from = reinterpret_cast<const uint4*>(row + split.head);
    uint4* to = reinterpret_cast<uint4*>(out + split.head);

    const int64_t first = stretch * kGradientUnroll * blockDim.x + threadIdx.x;
    uint4 bits[kGradientUnroll];
    if (weight != 0.0f) {
#pragma unroll
      for (int u = 0; u < kGradientUnroll; ++u) {
        if (first + u * blockDim.x < split.vectors) bits[u] = LoadStreaming(from + first + u * blockDim.x);
      }
    }
#pragma unroll
    for (int u = 0; u < kGradientUnroll; ++u) {
      const int64_t v = first + u * blockDim.x;
      if (v >= split.vectors) break;
      if (weight == 0.0f) {
        StoreStreaming(to + v, make_uint4(0, 0, 0, 0));
        continue;
      }
      float x[kN];
      Unpack(bits[u], x, row);
      const int64_t target = label - (split.head + v * kN);
#pragma unroll
      for (int i = 0; i < kN; ++i) x[i] = terms.At<kSoftcap>(x[i], i == target, softcap, inverse_softcap);
      StoreStreaming(to + v, Pack(x, row));
    }
    if (stretch == 0) {
      for (int64_t i = threadIdx.x; i < split.loose; i += blockDim.x) {
        const int64_t c = split.ColumnOfLoose(i);
        const float x =
            weight == 0.0f ? 0.0f : terms.At<kSoftcap>(ToFloat(row[c]), c == label, softcap, inverse_softcap);
        out[c] = FromFloat<T>(x);
      }
      for (int64_t c = vocab + threadIdx.x; c < stride; c += blockDim.x) out[c] = FromFloat<T>(0.0f);
    }
  }
}

template <typename T>
Status LaunchGradient(cudaStream_t stream, const Logits& logits, const Gradient& gradient) {
  const int64_t vectors = std::max<int64_t>(1, logits.vocab / kPer16Bytes<T>);
  // A short row takes as many threads as it has vectors, a power of two from 8 up; the rest take further rows.
  unsigned width = 8;
  while (width < kGradientThreads && width * kGradientUnroll < vectors) width *= 2;
  const dim3 threads(width, width >= 256 ? 1 : 256 / width);
  const int64_t stretches = (vectors + width * kGradientUnroll - 1) / (width * kGradientUnroll);
  const int64_t blocks = (logits.rows + threads.y - 1) / threads.y * stretches;
  auto* kernel = logits.softcap > 0.0f ? GradientOnStretches<T, true> : GradientOnStretches<T, false>;
  return Launch(stream, kernel, blocks, threads, 1, 0, static_cast<const T*>(logits.data), logits.labels, logits.rows,
                logits.vocab, logits.stride, stretches, logits.softcap, gradient);
}

}  // namespace

Status ComputeGradient(const Executor& executor, const Logits& logits, const Gradient& gradient) {
  if (logits.rows == 0) return Status::Ok();
  if (reinterpret_cast<uintptr_t>(logits.data) % 16 != reinterpret_cast<uintptr_t>(gradient.out) % 16) {
    return Status::Failed("logits and gradient must have the same alignment to 16 bytes");
  }
  auto* launch = logits.dtype == DType::kFloat32 ? LaunchGradient<float> : LaunchGradient<__nv_bfloat16>;
  return launch(executor.stream, logits, gradient);
}

}  // namespace te::softmax_cross_entropy
