// The two FP8 formats: their limits, the scale of a tensor, and conversions that give the same bits on every platform.
#pragma once

#include <bit>
#include <cstdint>

#ifdef __CUDACC__
#define TE_JAX_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TE_JAX_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace te {

enum class Fp8 { kE4M3, kE5M2 };

// 4 bits of exponent, 3 of mantissa. There is no infinity, and one NaN for each sign.
struct E4M3 {
  static constexpr int kMantissaBits = 3;
  static constexpr int kBias = 7;
  static constexpr float kMax = 448.0f;
  static constexpr uint32_t kInfinity = 0x7f;  // the code that stands for infinite values: NaN
};

// 5 bits of exponent, 2 of mantissa: the upper half of a float16.
struct E5M2 {
  static constexpr int kMantissaBits = 2;
  static constexpr int kBias = 15;
  static constexpr float kMax = 57344.0f;
  static constexpr uint32_t kInfinity = 0x7c;
};

inline constexpr uint32_t kFp8NaN = 0x7f;  // in both formats; NaN is stored without its sign

TE_JAX_HOST_DEVICE uint32_t FloatBits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  return std::bit_cast<uint32_t>(x);
#endif
}

TE_JAX_HOST_DEVICE float FloatFromBits(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

inline constexpr uint32_t kFloatInfinityBits = 0x7f800000u;
inline constexpr uint32_t kFloatSmallestNormalBits = 0x00800000u;
inline constexpr uint32_t kQuietNaN = 0x7fc00000u;

// Division as IEEE says, whatever the compiler's flags.
TE_JAX_HOST_DEVICE float Quotient(float numerator, float denominator) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(numerator, denominator);
#else
  return numerator / denominator;
#endif
}

// The scale, which maps `amax` to the largest finite value of the format F: 1 where amax is not finite or below the
// smallest normal float, at most 2^126 so that its reciprocal is normal too.
template <typename F>
TE_JAX_HOST_DEVICE float ScaleOf(float amax, bool power_of_two) {
  constexpr float kSmallest = F::kMax * 0x1p-126f;  // where the scale would be 2^126
  const uint32_t bits = FloatBits(amax);
  const float scale = Quotient(F::kMax, amax > kSmallest ? amax : kSmallest);
  const uint32_t rounded = power_of_two ? FloatBits(scale) & kFloatInfinityBits : FloatBits(scale);
  return bits < kFloatSmallestNormalBits || bits >= kFloatInfinityBits ? 1.0f : FloatFromBits(rounded);
}

// The factor from codes to values, for the scale of `amax`: NaN where amax is not finite, so that all values that share
// the scale read as NaN, those too that saturated under a scale of 1.
TE_JAX_HOST_DEVICE float ScaleInvOf(float amax, float scale) {
  const bool finite = (FloatBits(amax) & 0x7fffffffu) < kFloatInfinityBits;
  return finite ? Quotient(1.0f, scale) : FloatFromBits(kQuietNaN);
}

// The FP8 code of clip(x · scale, ±F::kMax), rounded to nearest even. Subnormal x counts as zero. NaN and infinities
// stay visible: NaN becomes NaN, an infinity F::kInfinity. Free of branches, for vectorised loops.
template <typename F>
TE_JAX_HOST_DEVICE uint8_t EncodeFp8(float x, float scale) {
  constexpr int kShift = 23 - F::kMantissaBits;
  constexpr uint32_t kRebias = uint32_t{127 - F::kBias} << 23;
  constexpr uint32_t kSmallestNormal = uint32_t{128 - F::kBias} << 23;
  // A float of this size has the spacing of FP8 subnormals: a sum with it ends in the bits of the rounded code.
  constexpr uint32_t kAligned = uint32_t(127 + 23 + 1 - F::kBias - F::kMantissaBits) << 23;

  // From this magnitude on the code is NaN, whose sign is dropped.
  constexpr uint32_t kWithoutSign = kFloatInfinityBits + (F::kInfinity == kFp8NaN ? 0 : 1);

  const uint32_t bits = FloatBits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const float product = FloatFromBits(magnitude < kFloatSmallestNormalBits ? 0u : magnitude) * scale;
  const uint32_t clipped = FloatBits(product < F::kMax ? product : F::kMax);
  const uint32_t normal = (clipped - kRebias + ((1u << (kShift - 1)) - 1) + ((clipped >> kShift) & 1u)) >> kShift;
  const uint32_t subnormal = FloatBits(FloatFromBits(clipped) + FloatFromBits(kAligned)) - kAligned;
  const uint32_t finite = clipped < kSmallestNormal ? subnormal : normal;
  const uint32_t special = magnitude > kFloatInfinityBits ? kFp8NaN : F::kInfinity;
  const uint32_t code = magnitude >= kFloatInfinityBits ? special : finite;
  const uint32_t sign = (bits >> 24) & (magnitude < kWithoutSign ? 0x80u : 0u);
  return static_cast<uint8_t>(code | sign);
}

// The value of an FP8 code. Free of branches, and right where the processor flushes subnormal floats to zero.
template <typename F>
TE_JAX_HOST_DEVICE float DecodeFp8(uint8_t code) {
  constexpr int kShift = 23 - F::kMantissaBits;
  const uint32_t magnitude = uint32_t{code & 0x7fu} << kShift;
  const uint32_t sign = uint32_t{code & 0x80u} << 24;
  const float normal = FloatFromBits(magnitude + (uint32_t{127 - F::kBias} << 23));
  // With one more in the exponent there is a leading one before the mantissa, which is subtracted again.
  const float subnormal =
      FloatFromBits(magnitude + (uint32_t{128 - F::kBias} << 23)) - FloatFromBits(uint32_t{128 - F::kBias} << 23);
  const float finite = magnitude < kFloatSmallestNormalBits ? subnormal : normal;
  const uint32_t special = (code & 0x7fu) > F::kInfinity || F::kInfinity == kFp8NaN ? kQuietNaN : kFloatInfinityBits;
  const uint32_t value = (code & 0x7fu) >= F::kInfinity ? special : FloatBits(finite);
  return FloatFromBits(value | sign);
}

#ifdef __CUDACC__

// Four FP8 codes of floats that are scaled and not infinite, the first in the lowest byte: two conversion instructions,
// which round to nearest even, saturate, and make NaN 0x7f. Infinities would saturate as well.
template <typename F>
__device__ __forceinline__ uint32_t PackFp8(float a, float b, float c, float d) {
  uint16_t low, high;
  if constexpr (F::kMantissaBits == 3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  }
  return uint32_t{low} | uint32_t{high} << 16;
}

// A product that counts subnormal factors as zero, in one instruction.
__device__ __forceinline__ float MultiplyFlushed(float x, float scale) {
  float product;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(x), "f"(scale));
  return product;
}

#endif

}  // namespace te
