// The quantizing kernel: one thread block for each tile of 128 × 128 values (tile.cuh); TMA loads the values and stores
// the codes. While some blocks of a multiprocessor wait for TMA, others compute, and tiles are read and written in
// order; persistent blocks would lose that order. What is quantized may be computed from the values on the way
// (`Compute`). Other kernels, which compute a tile from several, end with EncodeTile too.
#pragma once

#include <cstdint>

#include "common/dependent_launch.cuh"
#include "common/tma.cuh"
#include "quantize/quantize.h"
#include "quantize/tile.cuh"

namespace te::quantize {

enum class Scales { kTensor, kRows, kBlocks };

// The scales of both copies, for which a kernel is compiled.
template <Scales kScales, bool kData128x128 = false, bool kTransposed128x128 = false>
struct Mode {
  static constexpr Scales scales = kScales;
  // A scale for each row of a tile (data), or each column (transposed), rather than one for the tile.
  static constexpr bool row_scales = kScales == Scales::kRows || (kScales == Scales::kBlocks && !kData128x128);
  static constexpr bool col_scales = kScales == Scales::kRows || (kScales == Scales::kBlocks && !kTransposed128x128);
  static constexpr bool same_codes = !row_scales && !col_scales;
};

// Thread blocks on a multiprocessor, at least: float32 values take twice the registers and shared memory.
template <typename T>
inline constexpr int kQuantizeBlocks = sizeof(T) == 4 ? 2 : 3;

// Tensor maps of x and both copies, for boxes of a tile; the last dimension is the matrix. Columns of x are the rows of
// `transposed`; column c has index (c / v, c % v) in two dimensions, for v columns in a vector, so that a box holds
// them in the order of `Staged`.
struct TensorMaps {
  CUtensorMap x;
  CUtensorMap data;
  CUtensorMap transposed;
};

struct Arguments {
  const void* x;
  Shape shape;
  bool power_of_two_scales;
  bool tile_fits;  // into shared memory, beside its codes; a tile of 16-bit values always does
  uint8_t* data;
  uint8_t* transposed;
  float* column_sums;
  TensorScaling tensor;
  RowScaling rows;
  BlockScaling blocks;
};

// The values of a tile as TMA loads them. Thread `coord` owns [coord.down * 8 + r][v * 16 + coord.across].
template <typename T>
using TileVectors = uint4[kTile][kTile / Words<T>::kPerVector];

// Shared memory by which threads exchange values while they encode a tile.
template <typename T>
struct Scratch {
  float row_scale[kTile];
  float col_scale[kTile];
  // By warp: the amax of its rows in each column, and of all its values.
  alignas(16) uint32_t col_magnitudes[kWarps][kAcross][Words<T>::kCount];
  uint32_t magnitudes[kWarps];
  float column_sums[kWarps][kTile];
};

template <typename T>
struct Shared {
  Staged<T> staged;
  alignas(128) TileVectors<T> tile;
  Scratch<T> scratch;
  uint64_t barrier;
};

template <>
struct Shared<float> {
  Staged<float> staged;
  Scratch<float> scratch;
  uint64_t barrier;
  alignas(128) TileVectors<float> tile;  // left out where it does not fit
};

// Starts TMA's load of a tile, with zeros outside of the matrix. One thread calls it.
template <typename T>
__device__ __forceinline__ void LoadTile(const CUtensorMap& map, const Tile& tile, Shared<T>& shared) {
  const uint32_t barrier = SharedAddress(&shared.barrier);
  BarrierInit(barrier, 1);
  BarrierInitFence();
  BarrierExpect(barrier, sizeof(shared.tile));
  LoadBox(SharedAddress(shared.tile), &map, tile.col * kTile, tile.row * kTile, tile.example, barrier);
}

// A thread's patch of a tile in shared memory.
template <typename T>
__device__ __forceinline__ void ReadPatch(const TileVectors<T>& tile, const ThreadCoord<T>& coord, Patch<T>& patch) {
#pragma unroll
  for (int v = 0; v < Words<T>::kVectors; ++v) {
#pragma unroll
    for (int r = 0; r < kPatch; ++r) {
      SetVector<T>(patch, r, v, tile[coord.down * kPatch + r][v * kAcross + coord.across]);
    }
  }
}

// Starts TMA's stores of both copies. One thread calls it, and BulkWaitRead before its block ends.
template <typename T>
__device__ __forceinline__ void StoreTile(const TensorMaps& maps, const Arguments& arguments, const Tile& tile,
                                          const Staged<T>& staged) {
  using W = Words<T>;
  if (arguments.data) {
    StoreBox(&maps.data, tile.col * kTile, tile.row * kTile, tile.example, SharedAddress(staged.data));
  }
  if (arguments.transposed) {
#pragma unroll
    for (int v = 0; v < W::kVectors; ++v) {
      StoreBox(&maps.transposed, tile.row * kTile, (tile.col * W::kVectors + v) * kAcross, 0, tile.example,
               SharedAddress(staged.transposed[v * W::kPerVector * kAcross]));
    }
  }
  BulkCommit();
}

template <typename T>
__device__ __forceinline__ void SumColumns(const Shape& shape, const Tile& tile, const ThreadCoord<T>& coord,
                                           const Patch<T>& patch, Scratch<T>& shared, float* column_sums) {
#pragma unroll
  for (int j = 0; j < kPatch; ++j) {
    float sum = Value<T>(patch[0], j);
#pragma unroll
    for (int r = 1; r < kPatch; ++r) sum += Value<T>(patch[r], j);
    sum += __shfl_xor_sync(kWholeWarp, sum, kAcross);
    if (coord.down % 2 == 0) shared.column_sums[threadIdx.x / 32][Words<T>::Column(coord.across, j)] = sum;
  }
  __syncthreads();
  const int col = tile.col * kTile + threadIdx.x;
  if (threadIdx.x < kTile && col < shape.cols) {
    float sum = shared.column_sums[0][threadIdx.x];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) sum += shared.column_sums[warp][threadIdx.x];
    column_sums[RowOffset(tile.RowOfAll(shape), shape.cols) + col] = sum;
  }
}

// Scales of a tile's rows, from their amaxes in the tile.
template <typename T, typename F>
__device__ __forceinline__ void ScaleRowsOfBlock(const Arguments& arguments, const Tile& tile,
                                                 const ThreadCoord<T>& coord, const Patch<T>& patch,
                                                 Scratch<T>& shared) {
  int row;
  bool first;
  const uint32_t magnitude = RowMagnitude<T>(patch, &row, &first);
  if (!first) return;
  const float amax = __uint_as_float(Words<T>::FloatBitsOf(magnitude));
  const float scale = ScaleOf<F>(amax, arguments.power_of_two_scales);
  shared.row_scale[coord.down * kPatch + row] = scale;
  if (arguments.data && coord.row + row < arguments.shape.rows) {
    const int64_t block = RowOffset(tile.ColOfAll(arguments.shape), arguments.shape.rows);
    arguments.blocks.scale_inv[block + coord.row + row] = ScaleInvOf(amax, scale);
  }
}

// Scales of a tile's columns, once all warps have written their amaxes to shared memory.
template <typename T, typename F>
__device__ __forceinline__ void ScaleColumnsOfBlock(const Arguments& arguments, const Tile& tile, Scratch<T>& shared) {
  using W = Words<T>;
  const int column = threadIdx.x;
  if (column >= kTile) return;
  const int j = column % W::kPerVector + column / (kAcross * W::kPerVector) * W::kPerVector;
  uint32_t magnitude = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const uint32_t* words = shared.col_magnitudes[warp][W::Owner(column)];
    if constexpr (W::kPaired) {
      magnitude = max(magnitude, uint32_t{reinterpret_cast<const uint16_t*>(words)[j]});
    } else {
      magnitude = max(magnitude, words[j]);
    }
  }
  const float amax = __uint_as_float(W::FloatBitsOf(magnitude));
  const float scale = ScaleOf<F>(amax, arguments.power_of_two_scales);
  shared.col_scale[column] = scale;
  const int col = tile.col * kTile + column;
  if (arguments.transposed && col < arguments.shape.cols) {
    const int64_t block = RowOffset(tile.RowOfAll(arguments.shape), arguments.shape.cols);
    arguments.blocks.transposed_scale_inv[block + col] = ScaleInvOf(amax, scale);
  }
}

// Scales of a tile's rows and columns from those of the whole tensor.
template <typename F>
__device__ __forceinline__ void ScaleRowsAndColumns(const Arguments& arguments, const Tile& tile, float* row_scale,
                                                    float* col_scale) {
  const RowScaling& scaling = arguments.rows;
  auto set = [&](const float* amax, int index, int count, float* scale, float* scale_inv) {
    if (!amax || index >= count) return;
    const int64_t place = RowOffset(tile.example, count) + index;
    *scale = ScaleOf<F>(amax[place], arguments.power_of_two_scales);
    if (scale_inv) scale_inv[place] = ScaleInvOf(amax[place], *scale);
  };
  const int i = threadIdx.x % kTile;
  if (threadIdx.x < kTile) {
    set(scaling.row_amax, tile.row * kTile + i, arguments.shape.rows, row_scale + i,
        tile.col == 0 ? scaling.row_scale_inv : nullptr);
  } else {
    set(scaling.col_amax, tile.col * kTile + i, arguments.shape.cols, col_scale + i,
        tile.row == 0 ? scaling.col_scale_inv : nullptr);
  }
}

// The scale of a tensor and, in one thread of its first tile, what results hold of it.
template <typename F>
__device__ __forceinline__ float ScaleOfTensor(const Arguments& arguments, const Tile& tile) {
  const float amax = arguments.tensor.amax[tile.example];
  const float scale = ScaleOf<F>(amax, arguments.power_of_two_scales);
  if (tile.row == 0 && tile.col == 0 && threadIdx.x == 0) {
    const float scale_inv = ScaleInvOf(amax, scale);
    if (arguments.tensor.scale_inv) arguments.tensor.scale_inv[tile.example] = scale_inv;
    if (arguments.tensor.transposed_scale_inv) arguments.tensor.transposed_scale_inv[tile.example] = scale_inv;
  }
  return scale;
}

// The amax of a tensor so far: only a larger one needs an atomic operation.
__device__ __forceinline__ uint32_t AmaxSoFar(const Arguments& arguments, const Tile& tile) {
  return *reinterpret_cast<volatile const uint32_t*>(arguments.tensor.own_amax + tile.example);
}

// Encodes the patches of a tile and starts the stores of both copies. All threads of a block call it; `staged` may lie
// over the tile that patches were read from, if all threads have read theirs (with blocks it waits for that itself).
//   scale   of the tensor; other modes find theirs, those of rows are in `shared` already
//   seen    AmaxSoFar, where the tensor's own amax is asked for
template <typename T, typename F, typename M>
__device__ __forceinline__ void EncodeTile(const TensorMaps& maps, const Arguments& arguments, const Tile& tile,
                                           const ThreadCoord<T>& coord, const Patch<T>& patch, float scale,
                                           uint32_t seen, Scratch<T>& shared, Staged<T>& staged) {
  using W = Words<T>;
  const Shape& shape = arguments.shape;
  const bool with_amax = M::scales == Scales::kTensor && arguments.tensor.own_amax != nullptr;
  uint32_t columns[W::kCount];
  ColumnMagnitudes<T>(patch, columns);
  const uint32_t magnitude = MaxOf<T>(columns);
  const bool special = W::FloatBitsOf(magnitude) >= kFloatInfinityBits;
  if constexpr (M::scales == Scales::kTensor) {
    if (with_amax) {
      const uint32_t of_warp = __reduce_max_sync(kWholeWarp, magnitude);
      if (threadIdx.x % 32 == 0) shared.magnitudes[threadIdx.x / 32] = of_warp;
    }
  }
  if (arguments.column_sums) {
    SumColumns<T>(shape, tile, coord, patch, shared, arguments.column_sums);
  }

  if constexpr (M::scales == Scales::kBlocks) {
    if constexpr (M::col_scales) {
#pragma unroll
      for (int w = 0; w < W::kCount; ++w) {
        columns[w] = W::Max(columns[w], __shfl_xor_sync(kWholeWarp, columns[w], kAcross));
      }
      if (coord.down % 2 == 0) {
#pragma unroll
        for (int v = 0; v < W::kVectors; ++v) {
          reinterpret_cast<uint4*>(shared.col_magnitudes[threadIdx.x / 32][coord.across])[v] =
              make_uint4(columns[4 * v], columns[4 * v + 1], columns[4 * v + 2], columns[4 * v + 3]);
        }
      }
    }
    // After the columns: fewer registers are taken by then.
    if constexpr (M::row_scales) ScaleRowsOfBlock<T, F>(arguments, tile, coord, patch, shared);
    if constexpr (!M::row_scales || !M::col_scales) {
      const uint32_t of_warp = __reduce_max_sync(kWholeWarp, magnitude);
      if (threadIdx.x % 32 == 0) shared.magnitudes[threadIdx.x / 32] = of_warp;
    }
    __syncthreads();
    if constexpr (M::col_scales) ScaleColumnsOfBlock<T, F>(arguments, tile, shared);
    if constexpr (!M::row_scales || !M::col_scales) {
      uint32_t of_tile = shared.magnitudes[0];
#pragma unroll
      for (int warp = 1; warp < kWarps; ++warp) of_tile = max(of_tile, shared.magnitudes[warp]);
      const float amax = __uint_as_float(W::FloatBitsOf(of_tile));
      scale = ScaleOf<F>(amax, arguments.power_of_two_scales);
      if (threadIdx.x == 0) {
        const float scale_inv = ScaleInvOf(amax, scale);
        if (!M::row_scales && arguments.data) {
          arguments.blocks.scale_inv[RowOffset(tile.RowOfAll(shape), shape.TilesAcross()) + tile.col] = scale_inv;
        }
        if (!M::col_scales && arguments.transposed) {
          arguments.blocks.transposed_scale_inv[RowOffset(tile.ColOfAll(shape), shape.TilesDown()) + tile.row] =
              scale_inv;
        }
      }
    }
  }

  uint32_t codes[kPatch][2];
  if (M::same_codes || arguments.data) {
    EncodeRows<T, F>(patch, special, codes,
                     [&](int r) { return M::row_scales ? shared.row_scale[coord.down * kPatch + r] : scale; });
    if (arguments.data) staged.PutData(coord, codes);
  }
  if (arguments.transposed) {
    uint32_t turned[kPatch][2];
    if constexpr (M::same_codes) {
      Transpose(codes, turned);
    } else {
      if constexpr (M::scales == Scales::kBlocks && M::col_scales) __syncthreads();  // scales of columns are there
      EncodeColumns<T, F>(patch, special, turned,
                          [&](int j) { return M::col_scales ? shared.col_scale[W::Column(coord.across, j)] : scale; });
    }
    staged.PutTransposed(coord, turned);
  }
  AsyncProxyFence();
  __syncthreads();
  if (!shape.aligned) {
    StoreUnaligned(shape, tile, staged, arguments.data, arguments.transposed);
  } else if (threadIdx.x == 0) {
    StoreTile(maps, arguments, tile, staged);
  }
  // A block raises it once: all of a batch lie side by side, in one slice of the L2 cache.
  if (with_amax && threadIdx.x / 32 == 1) {
    const uint32_t of_warp = threadIdx.x % 32 < kWarps ? shared.magnitudes[threadIdx.x % 32] : 0;
    const uint32_t of_tile = W::FloatBitsOf(__reduce_max_sync(kWholeWarp, of_warp));
    if (threadIdx.x % 32 == 0 && of_tile > seen) AtomicMax(arguments.tensor.own_amax + tile.example, of_tile);
  }
}

// Computes nothing. For() gives what computes on a thread's patch in place, and reads all that it needs beside it:
// docs/fused_kernels.md.
struct AsTheyAre {
  template <typename T>
  struct Of {
    __device__ __forceinline__ void operator()(const ThreadCoord<T>&, Patch<T>&) const {}
  };

  template <typename T>
  __device__ __forceinline__ Of<T> For(const Tile&, const ThreadCoord<T>&) const {
    return {};
  }
};

template <typename T, typename F, typename M, typename Compute>
__global__ void __launch_bounds__(kThreads, kQuantizeBlocks<T>)
    QuantizeTile(const __grid_constant__ TensorMaps maps, const Arguments arguments, const Compute compute) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  Shared<T>& shared = *reinterpret_cast<Shared<T>*>(dynamic);
  const Shape shape = arguments.shape;
  const Tile tile = FindTile(shape, gridDim.x - 1 - blockIdx.x);
  // A kernel that clears own_amax waits for all before it, and may still run.
  const bool after_clear = M::scales == Scales::kTensor && arguments.tensor.own_amax != nullptr;
  if (!after_clear) WaitForPrimary();
  // Else threads load their own values.
  auto by_tma = [&] { return shape.aligned && (sizeof(T) == 2 || arguments.tile_fits); };
  if (by_tma() && threadIdx.x == 0) LoadTile<T>(maps.x, tile, shared);

  // Other reads overlap with TMA's.
  float scale = 1.0f;
  uint32_t seen = kQuietNaN;
  if constexpr (M::scales == Scales::kTensor) {
    scale = ScaleOfTensor<F>(arguments, tile);
    if (after_clear) {
      WaitForPrimary();
      seen = AmaxSoFar(arguments, tile);
    }
  }
  if constexpr (M::scales == Scales::kRows) {
    ScaleRowsAndColumns<F>(arguments, tile, shared.scratch.row_scale, shared.scratch.col_scale);
  }
  const ThreadCoord<T> coord(tile);
  const auto compute_patch = compute.template For<T>(tile, coord);
  __syncthreads();  // the barrier, and these scales, are there

  Patch<T> patch;
  if (by_tma()) {
    BarrierWait(SharedAddress(&shared.barrier), 0);
    ReadPatch<T>(shared.tile, coord, patch);
  } else {
    Load<T>(static_cast<const T*>(arguments.x) + tile.Example(shape), shape, coord, patch);
  }
  compute_patch(coord, patch);
  EncodeTile<T, F, M>(maps, arguments, tile, coord, patch, scale, seen, shared.scratch, shared.staged);
  if (threadIdx.x == 0) BulkWaitRead();
}

}  // namespace te::quantize
