// Gradient in FP8: the quantizing kernel (quantize/kernel.cuh) computes it on the way. One read, and a byte for each
// copy.

#include <cstdint>

#include "common/vector.cuh"
#include "quantize/launch.cuh"
#include "softmax_cross_entropy/row_gradient.cuh"
#include "softmax_cross_entropy/softmax_cross_entropy.h"

namespace te::softmax_cross_entropy {
namespace {

// What the quantizing kernel makes of a patch of logits. It reads what rows have in common while logits are on their
// way.
template <bool kSoftcap>
struct GradientOfPatch {
  Gradient gradient;
  const int32_t* labels;
  float softcap;
  int rows, vocab;

  template <typename T>
  struct Of {
    Gradient gradient;
    float softcap;
    int vocab;
    float lse[quantize::kPatch], weight[quantize::kPatch];
    int32_t label[quantize::kPatch];

    __device__ __forceinline__ void operator()(const quantize::ThreadCoord<T>& coord, quantize::Patch<T>& patch) const {
      using W = quantize::Words<T>;
      constexpr int kN = W::kPerVector;
      const float inverse_softcap = kSoftcap ? 1.0f / softcap : 0.0f;
#pragma unroll
      for (int r = 0; r < quantize::kPatch; ++r) {
        const RowTerms terms = TermsOf(gradient, lse[r], weight[r]);
#pragma unroll
        for (int v = 0; v < W::kVectors; ++v) {
          float x[kN];
#pragma unroll
          for (int j = 0; j < kN; ++j) {
            // A row of weight 0 may hold anything.
            const int column = coord.Column(v * kN + j);
            const bool counts = column < vocab && weight[r] != 0.0f;
            const float z = quantize::Value<T>(patch[r], v * kN + j);
            x[j] = counts ? terms.template At<kSoftcap>(z, column == label[r], softcap, inverse_softcap) : 0.0f;
          }
          quantize::SetVector<T>(patch, r, v, Pack(x, static_cast<const T*>(nullptr)));
        }
      }
    }
  };

  template <typename T>
  __device__ __forceinline__ Of<T> For(const quantize::Tile&, const quantize::ThreadCoord<T>& coord) const {
    Of<T> of;
    of.gradient = gradient;
    of.softcap = softcap;
    of.vocab = vocab;
#pragma unroll
    for (int r = 0; r < quantize::kPatch; ++r) {
      const int row = coord.row + r;
      of.weight[r] = row < rows ? gradient.weight[row] : 0.0f;
      of.lse[r] = row < rows ? gradient.lse[row] : 0.0f;
      of.label[r] = row < rows ? labels[row] : kIgnored;
    }
    return of;
  }
};

}  // namespace

Status QuantizeGradient(const Executor& executor, const Logits& logits, const Gradient& gradient,
                        const quantize::Copies& copies, const quantize::BlockScaling& scaling) {
  const quantize::Matrices x{logits.dtype, logits.data, 1, logits.rows, logits.stride};
  const int rows = static_cast<int>(logits.rows), vocab = static_cast<int>(logits.vocab);
  if (logits.softcap > 0.0f) {
    const GradientOfPatch<true> compute{gradient, logits.labels, logits.softcap, rows, vocab};
    return quantize::LaunchQuantizeBlocks(executor.stream, x, copies, scaling, compute);
  }
  const GradientOfPatch<false> compute{gradient, logits.labels, logits.softcap, rows, vocab};
  return quantize::LaunchQuantizeBlocks(executor.stream, x, copies, scaling, compute);
}

}  // namespace te::softmax_cross_entropy
