// Functions of the CPU kernels' loops, for the vectoriser: straight-line code that calls no library.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "common/cpu_float.h"

namespace te {

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

}  // namespace te
