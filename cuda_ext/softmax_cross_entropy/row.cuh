// Logits of a row, as every kernel of the loss reads them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/vector.cuh"

namespace te::softmax_cross_entropy {

inline constexpr float kLog2E = 1.4426950408889634f;

// Callers subtract before this multiplies: one fused z·log2e - base·log2e is an instruction less, but rounds
// base·log2e, and at logits of 10^4 exp would be off by 10^-3.
__device__ __forceinline__ float Exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * kLog2E));
  return y;
}

// Rounded before anything is subtracted: a fused softcap · tanh - max may exceed 0 by half a digit of max, which for
// large caps is a large exponent.
template <bool kSoftcap>
__device__ __forceinline__ float Cap(float x, float softcap, float inverse_softcap) {
  return kSoftcap ? __fmul_rn(softcap, tanhf(x * inverse_softcap)) : x;
}

// A row as 16-byte vectors in the middle and fewer than two vectors' worth of loose elements around them, where it does
// not start or stop on a 16-byte boundary.
template <typename T>
struct Split {
  static constexpr int kN = kPer16Bytes<T>;
  int64_t head;
  int64_t vectors;
  int64_t loose;

  __device__ Split(const T* row, int64_t vocab) {
    const int64_t past = (reinterpret_cast<uintptr_t>(row) % 16) / sizeof(T);
    head = min(vocab, past == 0 ? int64_t{0} : kN - past);
    vectors = (vocab - head) / kN;
    loose = vocab - vectors * kN;
  }
  __device__ int64_t ColumnOfLoose(int64_t i) const { return i < head ? i : i + vectors * kN; }
};

}  // namespace te::softmax_cross_entropy
