// Kernels that have rows in registers: sums over a thread block, and how many vectors each thread takes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "common/status.h"
#include "common/vector.cuh"
#include "norm/norm.h"
#include "quantize/tile.cuh"

namespace te::norm {

inline constexpr int kMostThreads = 512, kMostWarps = kMostThreads / 32;

__device__ __forceinline__ float Shuffled(float x, int mask) { return __shfl_xor_sync(quantize::kWholeWarp, x, mask); }
__device__ __forceinline__ float2 Shuffled(float2 x, int mask) {
  return make_float2(Shuffled(x.x, mask), Shuffled(x.y, mask));
}
__device__ __forceinline__ float Sum(float x, float y) { return x + y; }
__device__ __forceinline__ float2 Sum(float2 x, float2 y) { return make_float2(x.x + y.x, x.y + y.y); }

// Sums over a thread block, of which every thread gets the result. Calls alternate between two parts of `shared`, so
// that one barrier a call is enough.
template <typename V>
class BlockSums {
 public:
  using Shared = V[2][kMostWarps];

  __device__ explicit BlockSums(Shared& shared) : shared_(shared) {}

  __device__ __forceinline__ V operator()(V x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x = Sum(x, Shuffled(x, mask));
    V* const of_warps = shared_[turn_];
    turn_ ^= 1;
    const int lane = threadIdx.x % 32;
    if (lane == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    const int warp = lane % kMostWarps;
    x = warp < blockDim.x / 32 ? of_warps[warp] : V{};
#pragma unroll
    for (int mask = kMostWarps / 2; mask > 0; mask /= 2) x = Sum(x, Shuffled(x, mask));
    return x;
  }

 private:
  Shared& shared_;
  int turn_ = 0;
};

inline Status CheckSize(const Inputs& inputs) {
  const int64_t rows = inputs.count * inputs.rows;
  if (rows < INT32_MAX && inputs.cols < INT32_MAX) return Status::Ok();
  return Status::Failed("x has " + std::to_string(rows) + " rows of " + std::to_string(inputs.cols) +
                        " values; both must be below 2^31");
}

// The number of 16-byte vectors in a row; 0 where rows are not made of them.
template <typename T>
int64_t VectorsPerRow(int64_t cols, std::initializer_list<const void*> arrays) {
  const bool aligned = cols % kPer16Bytes<T> == 0 && std::all_of(arrays.begin(), arrays.end(), OnSixteenBytes);
  return aligned ? cols / kPer16Bytes<T> : 0;
}

// A kernel for rows of as many vectors as its threads can have.
template <typename Job>
struct Instance {
  void (*kernel)(Job);
  int vectors_per_thread, most_threads;
};

// The first that has enough, or the one for long rows; and its threads.
template <typename Job>
struct Selected {
  void (*kernel)(Job);
  int vectors_per_thread = 0;
  unsigned threads;

  Selected(int64_t vectors, std::initializer_list<Instance<Job>> instances, void (*long_rows)(Job), int long_threads)
      : kernel(long_rows), threads(long_threads) {
    for (const auto& [of_rows, per_thread, most] : instances) {
      if (vectors == 0 || vectors > int64_t{per_thread} * most) continue;
      kernel = of_rows;
      vectors_per_thread = per_thread;
      threads = static_cast<unsigned>(((vectors + per_thread - 1) / per_thread + 31) / 32 * 32);
      return;
    }
  }
};

}  // namespace te::norm
