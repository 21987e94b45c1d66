// Rows are shared out to XLA's pool of CPU threads. For the statistics each row is read once, in blocks that stay in
// the L1 cache between the pass that finds the maximum and the pass that sums the exponentials; the gradient is
// elementwise.
//
// The loops are written for the vectoriser, and compiled for three instruction sets: the best is picked when the
// library is loaded, so that one wheel is fast on every x86-64.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "softmax_cross_entropy/softmax_cross_entropy.h"

// Sanitizers cannot instrument the resolvers that target_clones makes.
#if defined(__x86_64__) && defined(__linux__) && !defined(TE_JAX_SANITIZE) && \
    ((defined(__clang__) && __clang_major__ >= 17) || (!defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 12))
#define TE_JAX_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TE_JAX_CLONES
#endif
// Each clone must get its own copy of what it calls, compiled for its instruction set.
#define TE_JAX_INLINE inline __attribute__((always_inline))

namespace te::softmax_cross_entropy {
namespace {

constexpr int64_t kBlock = 2048;
constexpr int64_t kElementsPerTask = 65536;

using Float32 = float;
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

TE_JAX_INLINE float ToFloat(float x) { return x; }
TE_JAX_INLINE float ToFloat(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
// Integer arithmetic rather than a conversion instruction: it vectorises everywhere, and subnormals survive the
// flush-to-zero mode that XLA sets on its threads.
TE_JAX_INLINE float ToFloat(Float16 x) {
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13;
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  const float normal = std::bit_cast<float>(magnitude + ((127 - 15) << 23));
  const float special = std::bit_cast<float>(magnitude | 0x7f800000u);
  const float subnormal = std::bit_cast<float>(magnitude + ((127 - 14) << 23)) - 0x1p-14f;
  const float value = magnitude < (1u << 23) ? subnormal : magnitude >= (31u << 23) ? special : normal;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

TE_JAX_INLINE void FromFloat(float x, float* out) { *out = x; }

// Both round to nearest even, as hardware does.
TE_JAX_INLINE void FromFloat(float x, BFloat16* out) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
TE_JAX_INLINE void FromFloat(float x, Float16* out) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 leaves exactly the bits of a subnormal float16 at the end of the mantissa, rounded.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  out->bits = static_cast<uint16_t>((magnitude >= (143u << 23) ? special : finite) | ((bits >> 16) & 0x8000u));
}

// exp(x) for x < 80 within 1e-7, relative. 2^n · e^r with |r| <= ln2 / 2; e^r by its Taylor polynomial of degree 7.
// NaN stays NaN; what would be subnormal is 0.
TE_JAX_INLINE float Exp(float x) {
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, which then stands in the low mantissa bits
  const float shifted = x * 1.4426950408889634f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;
  float poly = 1.0f / 5040.0f;
  poly = poly * r + 1.0f / 720.0f;
  poly = poly * r + 1.0f / 120.0f;
  poly = poly * r + 1.0f / 24.0f;
  poly = poly * r + 1.0f / 6.0f;
  poly = poly * r + 0.5f;
  poly = poly * r + 1.0f;
  poly = poly * r + 1.0f;
  const float scale = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) << 23) + 0x3f800000u);
  const float result = poly * scale;
  return x < -87.0f ? 0.0f : result;
}

// tanh(x), through exp of a non-positive argument.
TE_JAX_INLINE float Tanh(float x) {
  const float magnitude = std::fabs(x);
  // Below 0.1 the quotient cancels; the odd series to x^7 is exact to float there.
  const float square = magnitude * magnitude;
  const float series =
      magnitude * (1.0f + square * (-1.0f / 3.0f + square * (2.0f / 15.0f + square * (-17.0f / 315.0f))));
  const float decay = Exp(-2.0f * magnitude);
  const float quotient = (1.0f - decay) / (1.0f + decay);
  return std::copysign(magnitude < 0.1f ? series : quotient, x);
}

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
    StatisticsOfRow(static_cast<const T*>(logits.data) + row * logits.vocab, logits.vocab, logits.labels[row],
                    logits.softcap, with_total, out.lse + row, out.target + row, out.total + row);
  }
}

template <typename T>
TE_JAX_INLINE void GradientOfRows(const Logits& logits, int64_t begin, int64_t end, const Gradient& gradient) {
  for (int64_t row = begin; row < end; ++row) {
    const T* in = static_cast<const T*>(logits.data) + row * logits.vocab;
    T* out = static_cast<T*>(gradient.out) + row * logits.vocab;
    const float weight = gradient.weight[row];
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
#pragma omp simd
      for (int64_t i = 0; i < logits.vocab; ++i) {
        const float tanh = Tanh(ToFloat(in[i]) / logits.softcap);
        const float slope = softmax * Exp(logits.softcap * tanh - lse) - uniform;
        FromFloat(slope * (1.0f - tanh * tanh), out + i);
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < logits.vocab; ++i) FromFloat(softmax * Exp(ToFloat(in[i]) - lse) - uniform, out + i);
    }
    if (here) {
      const float tanh = logits.softcap > 0.0f ? Tanh(x / logits.softcap) : 0.0f;
      const float z = logits.softcap > 0.0f ? logits.softcap * tanh : x;
      const float slope = softmax * Exp(z - lse) - uniform - weight * (1.0f - gradient.label_smoothing);
      FromFloat(slope * (1.0f - tanh * tanh), out + label);
    }
  }
}

// target_clones does not apply to templates: one plain function for each type.
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
TE_JAX_FUNCTIONS(Float16)
#undef TE_JAX_FUNCTIONS

template <typename Body>
void OverRows(const Executor& executor, const Logits& logits, const Body& body) {
  executor.ParallelFor(logits.rows, std::max<int64_t>(1, kElementsPerTask / logits.vocab), body);
}

}  // namespace

Status ComputeStatistics(const Executor& executor, const Logits& logits, bool with_total, Statistics out) {
  auto* compute = logits.dtype == DType::kFloat32    ? StatisticsOfFloat32
                  : logits.dtype == DType::kBFloat16 ? StatisticsOfBFloat16
                                                     : StatisticsOfFloat16;
  OverRows(executor, logits, [&](int64_t begin, int64_t end) { compute(logits, begin, end, with_total, out); });
  return Status::Ok();
}

Status ComputeGradient(const Executor& executor, const Logits& logits, const Gradient& gradient) {
  auto* compute = logits.dtype == DType::kFloat32    ? GradientOfFloat32
                  : logits.dtype == DType::kBFloat16 ? GradientOfBFloat16
                                                     : GradientOfFloat16;
  OverRows(executor, logits, [&](int64_t begin, int64_t end) { compute(logits, begin, end, gradient); });
  return Status::Ok();
}

}  // namespace te::softmax_cross_entropy
