// FP8 in rows, by kernels whose threads hold 16-byte vectors of a row: no tile, no shared memory.
//
// With few rows, as a decoder has, a kernel takes as long as one of its threads, which also waits for instructions from
// memory. So each thread has one vector, and thread blocks are small until all multiprocessors have one.
#pragma once

#include <cstdint>

#include "common/dependent_launch.cuh"
#include "common/vector.cuh"
#include "quantize/amax.cuh"
#include "quantize/quantize.h"
#include "quantize/tile.cuh"

namespace te::quantize {

inline constexpr int kRowThreads = 256;  // of a thread block, at most

// How rows are divided: each has `count` strips, and each strip a thread block.
struct RowStrips {
  int64_t count;
  int64_t threads;

  RowStrips(int64_t vectors, int64_t vectors_per_thread, int64_t most_threads = kRowThreads) {
    const auto ratio = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    count = ratio(vectors, vectors_per_thread * most_threads);
    threads = ratio(ratio(vectors, count * vectors_per_thread), 32) * 32;
  }

  // One vector a thread, and fewer threads in a block where rows are too few for all multiprocessors.
  static RowStrips OfSingleVectors(int64_t rows, int64_t vectors, int multiprocessors) {
    int64_t threads = kRowThreads;
    while (threads > 32 && rows * RowStrips(vectors, 1, threads).count < multiprocessors) threads /= 2;
    return RowStrips(vectors, 1, threads);
  }
};

// Takes vectors of T, of one matrix. All threads of a warp call it together, and a warp starts at a block of 128.
template <typename T>
class RowEncoder {
 public:
  static constexpr int kCount = kPer16Bytes<T>;

  // `first`: of all thread blocks of the matrix one, which writes the scale of a tensor.
  __device__ __forceinline__ RowEncoder(const RowOutputs& to, int64_t example, int64_t rows, int64_t cols, bool first)
      : to_(to), example_(example), rows_(rows), cols_(cols) {
    if (!to.data || !to.reference_amax) return;
    const float amax = to.reference_amax[example];
    scale_ = ScaleFor(amax);
    if (first && threadIdx.x == 0) to.scale_inv[example] = ScaleInvOf(amax, scale_);
  }

  // `count` values of row `row` of the matrix from column `vector` · kCount on, the rest of y are zeros. Threads have
  // consecutive vectors.
  __device__ __forceinline__ void operator()(int64_t row, int vector, int count, float (&y)[kCount]) {
    using W = Words<T>;
    constexpr int kLanes = kBlock / kCount;  // that share a block of 128 values
    const T* const type = nullptr;
    const uint4 rounded = Pack(y, type);
    Unpack(rounded, y, type);
    const uint32_t low = W::Max(W::Magnitudes(rounded.x), W::Magnitudes(rounded.y));
    const uint32_t high = W::Max(W::Magnitudes(rounded.z), W::Magnitudes(rounded.w));
    uint32_t magnitude = W::Single(W::Max(low, high));
    largest_ = max(largest_, magnitude);
    if (!to_.data) return;
    const bool special = W::FloatBitsOf(magnitude) >= kFloatInfinityBits;
    if (!to_.reference_amax) {
#pragma unroll
      for (int mask = kLanes / 2; mask > 0; mask /= 2) {
        magnitude = max(magnitude, __shfl_xor_sync(kWholeWarp, magnitude, mask));
      }
      const float amax = __uint_as_float(W::FloatBitsOf(magnitude));
      scale_ = ScaleFor(amax);
      if (vector % kLanes == 0 && count > 0) {
        const int64_t blocks = (cols_ + kBlock - 1) / kBlock;
        to_.scale_inv[(example_ * blocks + vector / kLanes) * rows_ + row] = ScaleInvOf(amax, scale_);
      }
    }
    if (count <= 0) return;
    uint32_t codes[kCount / 4];
#pragma unroll
    for (int h = 0; h < kCount / 4; ++h) {
      const float four[4] = {y[4 * h], y[4 * h + 1], y[4 * h + 2], y[4 * h + 3]};
      const float scales[4] = {scale_, scale_, scale_, scale_};
      codes[h] = to_.format == Fp8::kE4M3 ? Encode<E4M3>(four, scales, special) : Encode<E5M2>(four, scales, special);
    }
    uint8_t* const at = to_.data + (example_ * rows_ + row) * cols_ + vector * kCount;
    if (count < kCount || reinterpret_cast<uintptr_t>(at) % kCount != 0) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (j < count) at[j] = static_cast<uint8_t>(codes[j / 4] >> (8 * (j % 4)));
      }
    } else if constexpr (kCount == 8) {
      *reinterpret_cast<uint2*>(at) = make_uint2(codes[0], codes[1]);
    } else {
      *reinterpret_cast<uint32_t*>(at) = codes[0];
    }
  }

  // Raises the amax to the largest magnitude that the thread block has seen; all of its threads call it once, at the
  // end.
  __device__ __forceinline__ void RaiseAmax(uint32_t (&of_warps)[32]) const {
    if (!to_.amax) return;
    const uint32_t of_warp = __reduce_max_sync(kWholeWarp, largest_);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const uint32_t of_block = __reduce_max_sync(kWholeWarp, threadIdx.x < blockDim.x / 32 ? of_warps[threadIdx.x] : 0);
    const uint32_t bits = Words<T>::FloatBitsOf(of_block);
    float* const amax = to_.amax + example_;
    if (threadIdx.x == 0 && bits > *reinterpret_cast<volatile const uint32_t*>(amax)) AtomicMax(amax, bits);
  }

 private:
  __device__ __forceinline__ float ScaleFor(float amax) const {
    return to_.format == Fp8::kE4M3 ? ScaleOf<E4M3>(amax, to_.power_of_two_scales)
                                    : ScaleOf<E5M2>(amax, to_.power_of_two_scales);
  }

  const RowOutputs& to_;
  int64_t example_, rows_, cols_;
  float scale_ = 1.0f;
  uint32_t largest_ = 0;
};

// x as it is in FP8, with scales of 1×128 values. A thread has one vector.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    QuantizeVectors(const __grid_constant__ Matrices x, const __grid_constant__ RowOutputs outputs, unsigned strips) {
  constexpr int kCount = kPer16Bytes<T>;
  const unsigned row = blockIdx.x / strips, rows = static_cast<unsigned>(x.rows), example = row / rows;
  const int vectors = static_cast<int>(x.cols / kCount);
  const int v = static_cast<int>(blockIdx.x % strips * blockDim.x + threadIdx.x);
  WaitForPrimary();
  ReleaseDependents();
  RowEncoder<T> encode(outputs, example, x.rows, x.cols, false);
  uint4 bits = make_uint4(0, 0, 0, 0);
  if (v < vectors) bits = LoadStreaming(static_cast<const uint4*>(x.data) + int64_t{row} * vectors + v);
  float y[kCount];
  Unpack(bits, y, static_cast<const T*>(nullptr));
  encode(row % rows, v, v < vectors ? kCount : 0, y);
}

}  // namespace te::quantize
