// The functions and their derivatives, in float32. Exponentials and reciprocals are the hardware's approximations, with
// relative errors of 2^-21 or so; GELU's tanh becomes a sigmoid, since the hardware's tanh has errors of 2^-11.
#pragma once

#include <cstdint>

#include "activation/activation.h"

namespace te::activation {

// 1 / (1 + exp(-x)); 0 where exp(-x) overflows.
__device__ __forceinline__ float Sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// f(x) and f'(x).
template <Kind kKind>
__device__ __forceinline__ void ValueAndSlope(const Function& function, float x, float* value, float* slope) {
  if constexpr (kKind == Kind::kSilu) {
    const float alpha = function.alpha;
    const float s = Sigmoid(alpha * x);
    *value = x * s;
    *slope = fmaf(*value * alpha, 1.0f - s, s);
  } else if constexpr (kKind == Kind::kGelu) {
    constexpr float kTwiceRootOfTwoOverPi = 1.5957691216f;
    const float near = fminf(fmaxf(x, -16.0f), 16.0f);  // farther out the sigmoid is 0 or 1, and x³ may overflow
    const float square = near * near;
    const float s = Sigmoid(kTwiceRootOfTwoOverPi * near * fmaf(0.044715f, square, 1.0f));
    *value = x * s;
    *slope = fmaf(*value * (1.0f - s), kTwiceRootOfTwoOverPi * fmaf(3 * 0.044715f, square, 1.0f), s);
  } else {
    const float positive = x <= 0.0f ? 0.0f : x;  // NaN stays
    const bool squared = kKind == Kind::kSquaredRelu;
    *value = squared ? positive * positive : positive;
    *slope = squared ? 2.0f * positive : (x > 0.0f ? 1.0f : 0.0f);
  }
}

// Values of a vector: gate, up where gated, and dy in the backward pass. Forward, gate becomes y. Backward, gate and up
// become their gradients and dy becomes y.
template <Kind kKind, bool kGated, bool kBackward, int kCount>
__device__ __forceinline__ void Apply(const Function& function, float (&gate)[kCount], float (&up)[kCount],
                                      float (&dy)[kCount]) {
  const float limit = function.limit;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float value, slope, factor = 1.0f;
    bool gate_inside = true, up_inside = true;
    if constexpr (kGated) {
      gate_inside = !(gate[i] > limit);
      up_inside = !(up[i] > limit || up[i] < -limit);
      if (!gate_inside) gate[i] = limit;
      factor = (up_inside ? up[i] : copysignf(limit, up[i])) + function.offset;
    }
    ValueAndSlope<kKind>(function, gate[i], &value, &slope);
    if constexpr (!kBackward) {
      gate[i] = value * factor;
    } else {
      gate[i] = gate_inside ? dy[i] * factor * slope : 0.0f;
      if constexpr (kGated) up[i] = up_inside ? dy[i] * value : 0.0f;
      dy[i] = value * factor;
    }
  }
}

}  // namespace te::activation
