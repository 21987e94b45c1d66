// Online softmax: lse and the sum of a row, from partial results of threads and warps.
#pragma once

#include <cmath>
#include <cstdint>

#include "softmax_cross_entropy/row.cuh"
#include "softmax_cross_entropy/softmax_cross_entropy.h"

namespace te::softmax_cross_entropy {

inline constexpr int kWarp = 32;

// Running max and Σ exp(z - max), with Σ z beside them. Without initialisers: every thread would run them on arrays in
// shared memory, while others already write there.
struct Partial {
  float max;
  float sum;
  float total;
};

__device__ __forceinline__ Partial EmptyPartial() { return {-INFINITY, 0.0f, 0.0f}; }

// The value to subtract from logits before exp. A row that is all -inf so far has no finite max, and -inf - (-inf)
// would be NaN: there every term is exp(-inf) = 0 whatever is subtracted.
__device__ __forceinline__ float Base(float max) { return max == -INFINITY ? 0.0f : max; }

__device__ __forceinline__ Partial Merge(const Partial& a, const Partial& b) {
  Partial merged;
  merged.max = fmaxf(a.max, b.max);
  const float base = Base(merged.max);
  merged.sum = a.sum * Exp(a.max - base) + b.sum * Exp(b.max - base);
  merged.total = a.total + b.total;
  return merged;
}

template <bool kTotal, int kCount>
__device__ __forceinline__ void Accumulate(Partial& partial, const float (&z)[kCount]) {
  float max = z[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) max = fmaxf(max, z[i]);
  if (max > partial.max) {
    // The first time there is nothing to rescale, and exp(-inf) = 0 keeps it so.
    partial.sum *= Exp(partial.max - Base(max));
    partial.max = max;
  }
  const float base = Base(partial.max);
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // independent chains
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sums[i % 4] += Exp(z[i] - base);
    if (kTotal) partial.total += z[i];
  }
  partial.sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Merges over groups of kLanes neighbouring lanes; only those named in `lanes` take part.
template <int kLanes>
__device__ __forceinline__ Partial MergeLanes(Partial partial, unsigned lanes = 0xffffffffu) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    Partial other;
    other.max = __shfl_xor_sync(lanes, partial.max, distance);
    other.sum = __shfl_xor_sync(lanes, partial.sum, distance);
    other.total = __shfl_xor_sync(lanes, partial.total, distance);
    partial = Merge(partial, other);
  }
  return partial;
}

__device__ __forceinline__ void WriteIgnored(int64_t index, const Statistics& out) {
  out.lse[index] = 0.0f;
  out.target[index] = 0.0f;
  out.total[index] = 0.0f;
}

}  // namespace te::softmax_cross_entropy
