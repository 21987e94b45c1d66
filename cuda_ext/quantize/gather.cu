// Quantizes rows that are gathered from a table, such as tokens sorted by expert, in the pass that gathers them.
//
// Threads copy their patches straight from the rows of the table, 256 contiguous bytes at a time (bfloat16): Hopper's
// TMA does not gather. To find a tile and its rows takes two reads, one after the other, before the copy can start, so
// a thread block has several tiles side by side.
//
// Bytes per bfloat16 value: 2 read and 1 written for each copy, where a gather of its own would read and write 4 more.
// A token is read for each of its experts: tiles of all experts are taken in the order of their tokens, so that they
// read it at about the same time, and all but the first of them find it in the L2 cache.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/block_limits.h"
#include "common/copy_async.cuh"
#include "common/dependent_launch.cuh"
#include "common/vector.cuh"
#include "quantize/kernel.cuh"
#include "quantize/launch.cuh"
#include "quantize/quantize.h"
#include "quantize/tile.cuh"

namespace te::quantize {
namespace {

// Tiles of a thread block, which copies one while it encodes the one before. Of few tiles it has one: fewer blocks
// would not fill the GPU.
constexpr int kRun = 4;
constexpr int64_t kFewTiles = 2048;

struct Source {
  const int32_t* index;
  uint32_t rows;  // of a table; an index is below 2^31
  const int32_t* order;
  int run;  // tiles of a thread block, side by side
};

template <typename T>
struct GatheredShared {
  Staged<T> staged;
  uint4 vectors[kPatch * Words<T>::kVectors][kThreads];  // each thread reads those that it has copied
  Scratch<T> scratch;
  int32_t rows[kTile];  // of the table; -1 for none
};

template <>
struct GatheredShared<float> {
  Staged<float> staged;
  Scratch<float> scratch;
  int32_t rows[kTile];
  alignas(128) uint4 vectors[kPatch * Words<float>::kVectors][kThreads];  // left out where they do not fit
};

// Tiles side by side.
struct Run {
  Tile tile;  // the first
  int end;    // the column of tiles after the last
};

// Runs row by row of tiles, the rows in the order given.
__device__ __forceinline__ Run FindRun(const Shape& shape, const Source& source, int index) {
  const int down = shape.TilesDown(), across = shape.TilesAcross();
  const int runs = (across - 1) / source.run + 1;
  const int place = index / runs;
  int row = place % down;
  if (source.order) row = min(static_cast<uint32_t>(source.order[place]), static_cast<uint32_t>(down - 1));
  const int col = index % runs * source.run;
  return {{place / down, row, col}, min(col + source.run, across)};
}

// Which rows of the table are those of a tile.
__device__ __forceinline__ void FindRows(const Shape& shape, const Source& source, const Tile& tile, int32_t* rows) {
  if (threadIdx.x >= kTile) return;
  const int row = tile.row * kTile + threadIdx.x;
  const int32_t index = row < shape.rows ? source.index[RowOffset(tile.example, shape.rows) + row] : -1;
  rows[threadIdx.x] = static_cast<uint32_t>(index) < source.rows ? index : -1;
}

// Starts the copies of a thread's patch to shared memory; rows of no token, and what is beyond the columns, become
// zero.
template <typename T>
__device__ __forceinline__ void StartPatch(const T* x, const Shape& shape, const ThreadCoord<T>& coord,
                                           GatheredShared<T>& shared) {
  using W = Words<T>;
#pragma unroll
  for (int v = 0; v < W::kVectors; ++v) {
    const int col = coord.Column(v * W::kPerVector);
#pragma unroll
    for (int r = 0; r < kPatch; ++r) {
      const int32_t row = shared.rows[coord.down * kPatch + r];
      const bool inside = row >= 0 && col < shape.cols;
      const T* from = inside ? x + RowOffset(row, shape.cols) + col : x;
      CopyAsync(&shared.vectors[v * kPatch + r][threadIdx.x], from, inside);
    }
  }
}

template <typename T>
__device__ __forceinline__ void FinishPatch(const GatheredShared<T>& shared, Patch<T>& patch) {
  CopyAsyncWait();
#pragma unroll
  for (int v = 0; v < Words<T>::kVectors; ++v) {
#pragma unroll
    for (int r = 0; r < kPatch; ++r) SetVector<T>(patch, r, v, shared.vectors[v * kPatch + r][threadIdx.x]);
  }
}

template <typename T, typename F, typename M>
__global__ void __launch_bounds__(kThreads, kQuantizeBlocks<T>)
    QuantizeGatheredTiles(const __grid_constant__ TensorMaps maps, const Arguments arguments, const Source source) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  GatheredShared<T>& shared = *reinterpret_cast<GatheredShared<T>*>(dynamic);
  const Shape& shape = arguments.shape;
  WaitForPrimary();  // the order may be the result of the kernel before
  Run run = FindRun(shape, source, gridDim.x - 1 - blockIdx.x);
  Tile& tile = run.tile;
  FindRows(shape, source, tile, shared.rows);
  __syncthreads();
  const T* x = static_cast<const T*>(arguments.x) + int64_t{tile.example} * source.rows * shape.cols;
  if (shape.aligned) StartPatch<T>(x, shape, ThreadCoord<T>(tile), shared);
  for (; tile.col < run.end; ++tile.col) {
    const ThreadCoord<T> coord(tile);
    Patch<T> patch;
    if (shape.aligned) {
      FinishPatch<T>(shared, patch);
      // The next tile comes while this one is encoded.
      if (tile.col + 1 < run.end) {
        StartPatch<T>(x, shape, ThreadCoord<T>({tile.example, tile.row, tile.col + 1}), shared);
      }
    } else {
      LoadUnaligned<T>(shape, coord, patch, [&](int r) -> const T* {
        const int32_t row = shared.rows[coord.down * kPatch + r];
        return row < 0 ? nullptr : x + RowOffset(row, shape.cols);
      });
    }
    if (threadIdx.x == 0) BulkWaitRead();  // the tile before has left `staged`, which EncodeTile fills after a barrier
    EncodeTile<T, F, M>(maps, arguments, tile, coord, patch, 1.0f, kQuietNaN, shared.scratch, shared.staged);
  }
  if (threadIdx.x == 0) BulkWaitRead();
}

template <typename T, typename F, typename M>
Status Launch(cudaStream_t stream, Arguments arguments, const Source& source) {
  int most = 0;
  if (Status s = CountSharedBytes(&most); !s.ok()) return s;
  constexpr int kBytes = sizeof(GatheredShared<T>);
  constexpr int kLeastBytes = sizeof(T) == 4 ? offsetof(GatheredShared<T>, vectors) : kBytes;
  static_assert(kLeastBytes <= kLeastSharedBytes);
  // Else values one by one, as if they were not aligned: slow, but only products that 9.0 alone has read gathered rows.
  const bool fits = kBytes <= most;
  arguments.shape.aligned &= fits;
  TensorMaps maps{};
  const Shape& shape = arguments.shape;
  if (shape.aligned && !DescribeCopies<T>(arguments, &maps)) {
    return Status::Failed("cuTensorMapEncodeTiled refuses a copy of x");
  }
  const int64_t runs = (shape.TilesAcross() - 1) / source.run + 1;
  return LaunchBlocks<QuantizeGatheredTiles<T, F, M>, kBytes>(stream, int64_t{shape.count} * shape.TilesDown() * runs,
                                                              fits ? kBytes : kLeastBytes, maps, arguments, source);
}

}  // namespace

Status QuantizeBlocksOfRows(const Executor& executor, const Matrices& x, const Gather& gather, const Copies& copies,
                            const BlockScaling& scaling) {
  if (Status s = CheckSize(x); !s.ok()) return s;
  Arguments arguments = ArgumentsOf(x, copies);
  arguments.blocks = scaling;
  const auto rows = static_cast<uint32_t>(std::min<int64_t>(gather.rows, int64_t{1} << 31));
  const Source source{gather.index, rows, gather.order, arguments.shape.Tiles() < kFewTiles ? 1 : kRun};
  return WithModeOfBlocks(copies, scaling, [&]<typename M>() {
    return WithTypes(x.dtype, copies.format,
                     [&]<typename T, typename F>() { return Launch<T, F, M>(executor.stream, arguments, source); });
  });
}

}  // namespace te::quantize
