// XLA's pool of CPU threads works on ranges of rows. For the statistics each row is read once, in blocks that stay in
// the L1 cache between the pass that finds the maximum and the pass that sums the exponentials; the gradient is
// elementwise.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "common/cpu_float.h"
#include "common/cpu_math.h"
#include "softmax_cross_entropy/softmax_cross_entropy.h"

namespace te::softmax_cross_entropy {
namespace {

constexpr int64_t kBlock = 2048;
constexpr int64_t kElementsPerTask = 65536;

template <typename T>
TE_JAX_INLINE void StatisticsOfRow(const T* row, int64_t vocab, int32_t label, float softcap, bool with_total,
                                   float* lse, float* target, float* total) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float z[kBlock];
  float row_max = -kInfinity;
  double row_sum = 0.0;
  double row_total = 0.0;
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    const int64_t count = std::min(kBlock, vocab - begin);
    float block_max = -kInfinity;
    if (softcap > 0.0f) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) z[i] = softcap * Tanh(ToFloat(row[begin + i]) / softcap);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) z[i] = ToFloat(row[begin + i]);
    }
#pragma omp simd reduction(max : block_max)
    for (int64_t i = 0; i < count; ++i) block_max = z[i] > block_max ? z[i] : block_max;
    if (block_max > row_max) {
      row_sum *= std::exp(static_cast<double>(row_max) - block_max);
      row_max = block_max;
    }
    // A row that is all -inf so far has no finite maximum to subtract, and needs none.
    const float base = row_max == -kInfinity ? 0.0f : row_max;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += Exp(z[i] - base);
    row_sum += sum;
    if (with_total) {
      float block_total = 0.0f;
#pragma omp simd reduction(+ : block_total)
      for (int64_t i = 0; i < count; ++i) block_total += z[i];
      row_total += block_total;
    }
    if (begin <= label && label < begin + count) *target = z[label - begin];
  }
  *lse = static_cast<float>(row_max + std::log(row_sum));
  *total = static_cast<float>(row_total);
}

template <typename T>
TE_JAX_INLINE void StatisticsOfRows(const Logits& logits, int64_t begin, int64_t end, bool with_total, Statistics out) {
  for (int64_t row = begin; row < end; ++row) {
    out.lse[row] = out.target[row] = out.total[row] = 0.0f;
    if (logits.labels[row] == kIgnored) continue;
    StatisticsOfRow(static_cast<const T*>(logits.data) + row * logits.stride, logits.vocab, logits.labels[row],
                    logits.softcap, with_total, out.lse + row, out.target + row, out.total + row);
  }
}

// z, which no lse is below: fused with the subtraction of lse, an unrounded product softcap · tanh may lie above it by
// half a digit, which for large caps is a large exponent.
TE_JAX_INLINE float AtMost(float lse, float z) { return z < lse ? z : lse; }

template <typename T>
TE_JAX_INLINE void GradientOfRows(const Logits& logits, int64_t begin, int64_t end, const Gradient& gradient) {
  for (int64_t row = begin; row < end; ++row) {
    const T* in = static_cast<const T*>(logits.data) + row * logits.stride;
    T* out = static_cast<T*>(gradient.out) + row * logits.stride;
    const float weight = gradient.weight[row];
    std::memset(out + logits.vocab, 0, (logits.stride - logits.vocab) * sizeof(T));
    if (weight == 0.0f) {
      std::memset(out, 0, logits.vocab * sizeof(T));
      continue;
    }
    const float lse = gradient.lse[row];
    const float softmax = weight * (1.0f + 2.0f * gradient.z_loss * lse);
    const float uniform = weight * gradient.uniform;
    const int64_t label = logits.labels[row];
    const bool here = 0 <= label && label < logits.vocab;
    const float x = here ? ToFloat(in[label]) : 0.0f;  // read before it is overwritten in place
    if (logits.softcap > 0.0f) {
      // Three loops: GCC does not vectorise a single one, for which it makes branches of the choices in Tanh and Exp.
      float tanh[kBlock], probability[kBlock];
      for (int64_t begin = 0; begin < logits.vocab; begin += kBlock) {
        const int64_t count = std::min(kBlock, logits.vocab - begin);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) tanh[i] = Tanh(ToFloat(in[begin + i]) / logits.softcap);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) probability[i] = Exp(AtMost(lse, logits.softcap * tanh[i]) - lse);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) {
          FromFloat((softmax * probability[i] - uniform) * (1.0f - tanh[i] * tanh[i]), out + begin + i);
        }
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < logits.vocab; ++i) FromFloat(softmax * Exp(ToFloat(in[i]) - lse) - uniform, out + i);
    }
    if (here) {
      const float tanh = logits.softcap > 0.0f ? Tanh(x / logits.softcap) : 0.0f;
      const float z = logits.softcap > 0.0f ? AtMost(lse, logits.softcap * tanh) : x;
      const float slope = softmax * Exp(z - lse) - uniform - weight * (1.0f - gradient.label_smoothing);
      FromFloat(slope * (1.0f - tanh * tanh), out + label);
    }
  }
}

#define TE_JAX_FUNCTIONS(T)                                                                                      \
  TE_JAX_CLONES void StatisticsOf##T(const Logits& logits, int64_t begin, int64_t end, bool with_total,          \
                                     Statistics out) {                                                           \
    StatisticsOfRows<T>(logits, begin, end, with_total, out);                                                    \
  }                                                                                                              \
  TE_JAX_CLONES void GradientOf##T(const Logits& logits, int64_t begin, int64_t end, const Gradient& gradient) { \
    GradientOfRows<T>(logits, begin, end, gradient);                                                             \
  }
TE_JAX_FUNCTIONS(Float32)
TE_JAX_FUNCTIONS(BFloat16)
#undef TE_JAX_FUNCTIONS

template <typename Body>
void OverRows(const Executor& executor, const Logits& logits, const Body& body) {
  executor.ParallelFor(logits.rows, std::max<int64_t>(1, kElementsPerTask / logits.vocab), body);
}

}  // namespace

Status ComputeStatistics(const Executor& executor, const Logits& logits, bool with_total, Statistics out) {
  auto* compute = logits.dtype == DType::kFloat32 ? StatisticsOfFloat32 : StatisticsOfBFloat16;
  OverRows(executor, logits, [&](int64_t begin, int64_t end) { compute(logits, begin, end, with_total, out); });
  return Status::Ok();
}

Status ComputeGradient(const Executor& executor, const Logits& logits, const Gradient& gradient) {
  auto* compute = logits.dtype == DType::kFloat32 ? GradientOfFloat32 : GradientOfBFloat16;
  OverRows(executor, logits, [&](int64_t begin, int64_t end) { compute(logits, begin, end, gradient); });
  return Status::Ok();
}

Status ComputeBoth(const Executor& executor, const Logits& logits, bool with_total, Statistics statistics,
                   const Gradient& gradient) {
  if (Status s = ComputeStatistics(executor, logits, with_total, statistics); !s.ok()) return s;
  return ComputeGradient(executor, logits, gradient);
}

Status QuantizeGradient(const Executor& executor, const Logits& logits, const Gradient& gradient,
                        const quantize::Copies& copies, const quantize::BlockScaling& scaling) {
  const int64_t bytes = logits.rows * logits.stride * (logits.dtype == DType::kFloat32 ? 4 : 2);
  const std::unique_ptr<std::byte[]> values(new (std::nothrow) std::byte[bytes]);
  if (!values) return Status::Failed("not enough memory for the gradient in the dtype of the logits");
  Gradient in_memory = gradient;
  in_memory.out = values.get();
  if (Status s = ComputeGradient(executor, logits, in_memory); !s.ok()) return s;
  const quantize::Matrices x{logits.dtype, values.get(), 1, logits.rows, logits.stride};
  return quantize::QuantizeBlocks(executor, x, copies, scaling);
}

}  // namespace te::softmax_cross_entropy
