// The gradient of a logit, from its row's lse and weight.
#pragma once

#include "softmax_cross_entropy/row.cuh"
#include "softmax_cross_entropy/softmax_cross_entropy.h"

namespace te::softmax_cross_entropy {

// The terms of the gradient that all elements of a row share.
struct RowTerms {
  float lse;
  float softmax;  // factor of exp(z - lse)
  float uniform;  // subtracted everywhere
  float target;   // subtracted at the label

  template <bool kSoftcap>
  __device__ float At(float x, bool is_target, float softcap, float inverse_softcap) const {
    const float tanh = kSoftcap ? tanhf(x * inverse_softcap) : 0.0f;
    const float z = kSoftcap ? fminf(__fmul_rn(softcap, tanh), lse) : x;
    float slope = fmaf(softmax, Exp(z - lse), -uniform);
    if (is_target) slope -= target;
    return kSoftcap ? slope * (1.0f - tanh * tanh) : slope;
  }
};

__device__ __forceinline__ RowTerms TermsOf(const Gradient& gradient, float lse, float weight) {
  return {lse, weight * fmaf(2.0f * gradient.z_loss, lse, 1.0f), weight * gradient.uniform,
          weight * (1.0f - gradient.label_smoothing)};
}

}  // namespace te::softmax_cross_entropy
