// Quantizes rows that are gathered from a table, such as tokens sorted by expert, in the pass that gathers them.
//
// Threads load their patches straight from the rows of the table, 256 contiguous bytes at a time (bfloat16): Hopper's
// TMA does not gather. Bytes per bfloat16 value: 2 read and 1 written for each copy, where a gather of its own would
// read and write 4 more. A token is read for each of its experts: tiles of all experts are taken in the order of their
// tokens, so that they read it at about the same time, and all but the first of them find it in the L2 cache.

#include <algorithm>
#include <cstdint>

#include "common/dependent_launch.cuh"
#include "common/vector.cuh"
#include "quantize/kernel.cuh"
#include "quantize/launch.cuh"
#include "quantize/quantize.h"
#include "quantize/tile.cuh"

namespace te::quantize {
namespace {

struct Source {
  const int32_t* index;
  uint32_t rows;  // of a table; an index is below 2^31
  const int32_t* order;
};

template <typename T>
struct GatheredShared {
  Staged<T> staged;
  Scratch<T> scratch;
};

// Tiles row by row, the rows in the order given.
__device__ __forceinline__ Tile FindGatheredTile(const Shape& shape, const int32_t* order, int index) {
  const int down = shape.TilesDown(), across = shape.TilesAcross();
  const int place = index / across;  // among rows of tiles of all examples
  int row = place % down;
  if (order) row = min(static_cast<uint32_t>(order[place]), static_cast<uint32_t>(down - 1));
  return {place / down, row, index % across};
}

template <typename T>
__device__ __forceinline__ void GatherPatch(const T* x, const Source& source, const Shape& shape, const Tile& tile,
                                            const Place<T>& place, Patch<T>& patch) {
  using W = Words<T>;
  x += int64_t{tile.example} * source.rows * shape.cols;
  const int32_t* index = source.index + RowOffset(tile.example, shape.rows) + place.row;
  if (shape.aligned) {
    int4 rows[2] = {{-1, -1, -1, -1}, {-1, -1, -1, -1}};
    if (place.row < shape.rows) {
      rows[0] = reinterpret_cast<const int4*>(index)[0];
      rows[1] = reinterpret_cast<const int4*>(index)[1];
    }
    const int32_t row[kPatch] = {rows[0].x, rows[0].y, rows[0].z, rows[0].w,
                                 rows[1].x, rows[1].y, rows[1].z, rows[1].w};
#pragma unroll
    for (int v = 0; v < W::kVectors; ++v) {
      const int col = place.Column(v * W::kPerVector);
#pragma unroll
      for (int r = 0; r < kPatch; ++r) {
        uint4 bits = make_uint4(0, 0, 0, 0);
        if (static_cast<uint32_t>(row[r]) < source.rows && col < shape.cols) {
          bits = LoadStreaming(reinterpret_cast<const uint4*>(x + RowOffset(row[r], shape.cols) + col));
        }
        SetVector<T>(patch, r, v, bits);
      }
    }
    return;
  }
  LoadUnaligned<T>(shape, place, patch, [&](int r) -> const T* {
    const int32_t row = place.row + r < shape.rows ? index[r] : -1;
    return static_cast<uint32_t>(row) < source.rows ? x + RowOffset(row, shape.cols) : nullptr;
  });
}

template <typename T, typename F, typename M>
__global__ void __launch_bounds__(kThreads, kQuantizeBlocks<T>)
    QuantizeGatheredTile(const __grid_constant__ TensorMaps maps, const Arguments arguments, const Source source) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  GatheredShared<T>& shared = *reinterpret_cast<GatheredShared<T>*>(dynamic);
  const Shape& shape = arguments.shape;
  WaitForPrimary();  // the order may be the result of the kernel before
  const Tile tile = FindGatheredTile(shape, source.order, gridDim.x - 1 - blockIdx.x);
  const Place<T> place(tile);
  Patch<T> patch;
  GatherPatch<T>(static_cast<const T*>(arguments.x), source, shape, tile, place, patch);
  EncodeTile<T, F, M>(maps, arguments, tile, place, patch, 1.0f, kQuietNaN, shared.scratch, shared.staged);
  if (threadIdx.x == 0) BulkWaitRead();
}

template <typename T, typename F, typename M>
Status Launch(cudaStream_t stream, const Arguments& arguments, const Source& source) {
  TensorMaps maps{};
  if (arguments.shape.aligned && !DescribeCopies<T>(arguments, &maps)) {
    return Status::Failed("cuTensorMapEncodeTiled refuses a copy of x");
  }
  constexpr int kBytes = sizeof(GatheredShared<T>);
  return LaunchForTiles<QuantizeGatheredTile<T, F, M>, kBytes>(stream, arguments.shape, kBytes, maps, arguments,
                                                               source);
}

}  // namespace

Status QuantizeBlocksOfRows(const Executor& executor, const Matrices& x, const Gather& gather, const Copies& copies,
                            const BlockScaling& scaling) {
  if (Status s = CheckSize(x); !s.ok()) return s;
  Arguments arguments = ArgumentsOf(x, copies);
  arguments.shape.aligned &= OnSixteenBytes(gather.index);
  arguments.blocks = scaling;
  const auto rows = static_cast<uint32_t>(std::min<int64_t>(gather.rows, int64_t{1} << 31));
  const Source source{gather.index, rows, gather.order};
  return WithModeOfBlocks(copies, scaling, [&]<typename M>() {
    return WithTypes(x.dtype, copies.format,
                     [&]<typename T, typename F>() { return Launch<T, F, M>(executor.stream, arguments, source); });
  });
}

}  // namespace te::quantize
