// The amax of the whole tensor, or of its rows and columns, from one read. Thread blocks combine theirs by atomic
// maxima; a kernel sets these to zero before, and may still run while the next reads its first values.
#pragma once

#include <cstring>

#include "common/cuda_status.h"
#include "common/dependent_launch.cuh"
#include "quantize/tile.cuh"

namespace te::quantize {

struct Span {
  float* values;
  int64_t count;
};

// Sets values to zero. The next kernel may start once all before this one have ended.
static __global__ void ClearValues(Span first, Span second) {
  WaitForPrimary();
  ReleaseDependents();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < first.count) {
    first.values[i] = 0.0f;
  } else if (i - first.count < second.count) {
    second.values[i - first.count] = 0.0f;
  }
}

// Launches it. Either span may have no values.
static Status Clear(cudaStream_t stream, Span first, Span second = {}) {
  if (!first.values) first.count = 0;
  if (!second.values) second.count = 0;
  constexpr int kClearThreads = 256;
  const int64_t blocks = (first.count + second.count + kClearThreads - 1) / kClearThreads;
  return Check(LaunchAsDependent(ClearValues, static_cast<unsigned>(blocks), kClearThreads, 0, stream, first, second),
               "kernel launch");
}

inline constexpr int kAmaxThreads = 512;
inline constexpr int kAmaxUnroll = 8;  // 16-byte loads that a thread has in flight
inline constexpr int kAmaxBlocks = 2;  // on a multiprocessor

// Thread blocks read a tensor of `count` values forwards, `blocks` of them side by side.
template <typename T>
__global__ void __launch_bounds__(kAmaxThreads, kAmaxBlocks)
    AmaxOfValues(const T* x, int64_t count, unsigned blocks, bool aligned, float* amax) {
  using W = Words<T>;
  const unsigned example = blockIdx.x / blocks, block = blockIdx.x % blocks;
  x += example * count;
  uint32_t largest = 0;
  auto add = [&](const uint4& bits) {
    const uint32_t low = W::Max(W::Magnitudes(bits.x), W::Magnitudes(bits.y));
    const uint32_t high = W::Max(W::Magnitudes(bits.z), W::Magnitudes(bits.w));
    largest = W::Max(largest, W::Max(low, high));
  };
  const uint4* vectors = reinterpret_cast<const uint4*>(x);
  const int64_t vector_count = aligned ? count / W::kPerVector : 0;
  constexpr int64_t kChunk = kAmaxThreads * kAmaxUnroll;
  for (int64_t chunk = block * kChunk; chunk < vector_count; chunk += blocks * kChunk) {
    const uint4* from = vectors + chunk + threadIdx.x;
    if (chunk + kChunk <= vector_count) {
      uint4 bits[kAmaxUnroll];
#pragma unroll
      for (int u = 0; u < kAmaxUnroll; ++u) bits[u] = LoadStreaming(from + u * kAmaxThreads);
#pragma unroll
      for (int u = 0; u < kAmaxUnroll; ++u) add(bits[u]);
    } else {
      for (int64_t v = chunk + threadIdx.x; v < vector_count; v += kAmaxThreads) add(LoadStreaming(vectors + v));
    }
  }
  largest = W::Single(largest);
  const int64_t stride = int64_t{blocks} * kAmaxThreads;
  for (int64_t i = vector_count * W::kPerVector + block * kAmaxThreads + threadIdx.x; i < count; i += stride) {
    uint32_t word = 0;
    memcpy(&word, x + i, sizeof(T));
    largest = max(largest, W::Magnitudes(word));
  }
  largest = __reduce_max_sync(kWholeWarp, largest);
  __shared__ uint32_t of_warps[kAmaxThreads / 32];
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x < 32) {
    largest = threadIdx.x < kAmaxThreads / 32 ? of_warps[threadIdx.x] : 0;
    largest = __reduce_max_sync(kWholeWarp, largest);
    if (threadIdx.x == 0) {
      WaitForPrimary();
      AtomicMax(amax + example, W::FloatBitsOf(largest));
    }
  }
}

inline constexpr int kTilesPerColumnStrip = 8;
template <typename T>
inline constexpr int kRowAmaxBlocks = sizeof(T) == 4 ? 2 : 4;  // on a multiprocessor

// A thread block works on tiles below each other; the amaxes of columns stay in registers between them.
template <typename T>
__global__ void __launch_bounds__(kThreads, kRowAmaxBlocks<T>)
    AmaxOfRowsAndColumns(const T* x, const Shape shape, float* row_amax, float* col_amax) {
  using W = Words<T>;
  const int strips = (shape.TilesDown() + kTilesPerColumnStrip - 1) / kTilesPerColumnStrip;
  __shared__ uint32_t of_columns[kTile];
  for (int item = blockIdx.x; item < shape.count * strips * shape.TilesAcross(); item += gridDim.x) {
    const int tile_col = item % shape.TilesAcross();
    const int example = item / shape.TilesAcross() / strips;
    const int first = item / shape.TilesAcross() % strips * kTilesPerColumnStrip;
    const int last = min(first + kTilesPerColumnStrip, shape.TilesDown());
    const T* const from = x + Tile{example, first, tile_col}.Example(shape);
    uint32_t columns[W::kCount] = {};
    for (int tile_row = first; tile_row < last; ++tile_row) {
      const ThreadCoord<T> coord(Tile{example, tile_row, tile_col});
      Patch<T> patch;
      Load<T>(from, shape, coord, patch);
      uint32_t of_tile[W::kCount];
      ColumnMagnitudes<T>(patch, of_tile);
      WaitForPrimary();
#pragma unroll
      for (int w = 0; w < W::kCount; ++w) columns[w] = W::Max(columns[w], of_tile[w]);
      if (row_amax) {
        int row;
        bool writes;
        const uint32_t magnitude = RowMagnitude<T>(patch, &row, &writes);
        if (writes && coord.row + row < shape.rows) {
          AtomicMax(row_amax + RowOffset(example, shape.rows) + coord.row + row, W::FloatBitsOf(magnitude));
        }
      }
    }
    if (!col_amax) continue;
    if (threadIdx.x < kTile) of_columns[threadIdx.x] = 0;
    __syncthreads();
    const int across = threadIdx.x % kAcross;
#pragma unroll
    for (int w = 0; w < W::kCount; ++w) {
      const uint32_t both = W::Max(columns[w], __shfl_xor_sync(kWholeWarp, columns[w], kAcross));
      if (threadIdx.x % 32 >= kAcross) continue;
      if constexpr (W::kPaired) {
        atomicMax(&of_columns[W::Column(across, 2 * w)], both & 0xffffu);
        atomicMax(&of_columns[W::Column(across, 2 * w + 1)], both >> 16);
      } else {
        atomicMax(&of_columns[W::Column(across, w)], both);
      }
    }
    __syncthreads();
    const int col = tile_col * kTile + threadIdx.x;
    if (threadIdx.x < kTile && col < shape.cols) {
      AtomicMax(col_amax + RowOffset(example, shape.cols) + col, W::FloatBitsOf(of_columns[threadIdx.x]));
    }
    __syncthreads();
  }
}

}  // namespace te::quantize
