// Kernels that compute tiles and leave them in FP8: a thread block loads its tile of 128 × 128 values of up to three
// inputs by TMA, computes up to three results over them in shared memory, and encodes one after another with
// EncodeTile, whose codes take the place of the values. The stores of one result run while the next is encoded.
//
// Tiles of two inputs of float32, or of three of any type, are more than the 99 KB that some GPUs have (compute
// capability 12.0). There the results take turns in one tile of shared memory, and threads read the inputs from the L2
// cache again for each.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "common/block_limits.h"
#include "common/dependent_launch.cuh"
#include "common/tma.cuh"
#include "common/vector.cuh"
#include "quantize/amax.cuh"
#include "quantize/kernel.cuh"
#include "quantize/launch.cuh"

namespace te::quantize {

inline constexpr int kMostTiles = 3;  // of inputs, and of results

enum class Scaled { kTensor, kData128, kTransposed128, kBoth128, kNone128 };

// A result: which slot holds it, and how it is encoded.
struct ResultTile {
  int slot;
  Fp8 format;
  Scaled scaled;
  Arguments arguments;
};

// Inputs, each in the slot of its number, and results.
struct TileJob {
  Shape shape;
  int inputs;
  int results;
  const void* input[kMostTiles];
  CUtensorMap input_maps[kMostTiles];
  ResultTile result[kMostTiles];
  TensorMaps result_maps[kMostTiles];
};

// A tile in shared memory.
template <typename T>
struct alignas(1024) Slot {
  TileVectors<T> values;
};

// In shared memory, after the slots.
template <typename T>
struct AfterSlots {
  Scratch<T> scratch;
  uint64_t barrier;
};

template <typename T>
constexpr int SharedBytes(int inputs) {
  return inputs * sizeof(Slot<T>) + sizeof(AfterSlots<T>);
}

// Encodes the tile of a result, over itself. Not inlined: kernels would be compiled for each combination of results.
//   kBlocks   on a multiprocessor, for which registers are allotted
template <typename T, int kBlocks, typename F, typename M>
__device__ __noinline__ void EncodeResult(const TensorMaps& maps, const Arguments& arguments, const Tile& tile,
                                          Slot<T>& slot, Scratch<T>& scratch) {
  const ThreadCoord<T> coord(tile);
  float scale = 1.0f;
  uint32_t seen = kQuietNaN;
  if constexpr (M::scales == Scales::kTensor) {
    scale = ScaleOfTensor<F>(arguments, tile);
    if (arguments.tensor.own_amax) seen = AmaxSoFar(arguments, tile);
  }
  Patch<T> patch;
  ReadPatch<T>(slot.values, coord, patch);
  if constexpr (M::scales == Scales::kTensor) __syncthreads();  // all have read theirs
  EncodeTile<T, F, M>(maps, arguments, tile, coord, patch, scale, seen, scratch, reinterpret_cast<Staged<T>&>(slot));
}

template <typename T, int kBlocks, typename F>
__device__ __forceinline__ void EncodeScaled(const TensorMaps& maps, const ResultTile& result, const Tile& tile,
                                             Slot<T>& slot, Scratch<T>& scratch) {
  auto encode = [&]<typename M>() { EncodeResult<T, kBlocks, F, M>(maps, result.arguments, tile, slot, scratch); };
  switch (result.scaled) {
    case Scaled::kTensor:
      return encode.template operator()<Mode<Scales::kTensor>>();
    case Scaled::kNone128:
      return encode.template operator()<Mode<Scales::kBlocks, false, false>>();
    case Scaled::kData128:
      return encode.template operator()<Mode<Scales::kBlocks, true, false>>();
    case Scaled::kTransposed128:
      return encode.template operator()<Mode<Scales::kBlocks, false, true>>();
    case Scaled::kBoth128:
      return encode.template operator()<Mode<Scales::kBlocks, true, true>>();
  }
}

template <typename T, int kBlocks>
__device__ __forceinline__ void EncodeAny(const TileJob& job, int i, const Tile& tile, Slot<T>& slot,
                                          Scratch<T>& scratch) {
  const ResultTile& result = job.result[i];
  if (result.format == Fp8::kE4M3) {
    EncodeScaled<T, kBlocks, E4M3>(job.result_maps[i], result, tile, slot, scratch);
  } else {
    EncodeScaled<T, kBlocks, E5M2>(job.result_maps[i], result, tile, slot, scratch);
  }
}

// The tiles in shared memory, where results take the place of inputs: vectors of a row of tile `i`.
template <typename T>
struct TilesInSlots {
  Slot<T>* slots;

  __device__ __forceinline__ uint4 Get(int i, int row, int vector) const { return slots[i].values[row][vector]; }
  __device__ __forceinline__ void Set(int i, int row, int vector, const uint4& bits) const {
    slots[i].values[row][vector] = bits;
  }
};

// Inputs in memory, with zeros outside of the matrix; of the results only one is kept.
template <typename T>
struct TilesInMemory {
  const TileJob& job;
  const Tile& tile;
  Slot<T>& slot;
  int kept;

  __device__ __forceinline__ uint4 Get(int i, int row, int vector) const {
    constexpr int kCount = Words<T>::kPerVector;
    const Shape& shape = job.shape;
    const int first_row = tile.row * kTile + row, first_col = tile.col * kTile + vector * kCount;
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (first_row >= shape.rows) return bits;
    const T* from =
        static_cast<const T*>(job.input[i]) + tile.Example(shape) + RowOffset(first_row, shape.cols) + first_col;
    if (shape.aligned) return first_col < shape.cols ? *reinterpret_cast<const uint4*>(from) : bits;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (first_col + j < shape.cols) reinterpret_cast<T*>(&bits)[j] = from[j];
    }
    return bits;
  }
  __device__ __forceinline__ void Set(int i, int row, int vector, const uint4& bits) const {
    if (i == kept) slot.values[row][vector] = bits;
  }
};

// compute(tile, coord, tiles) computes the values that a thread owns in every tile, from those that it owns there:
// docs/fused_kernels.md.
template <typename T, int kBlocks, typename Compute>
__global__ void __launch_bounds__(kThreads, kBlocks)
    ComputeTiles(const __grid_constant__ TileJob job, const __grid_constant__ Compute compute) {
  static_assert(sizeof(Staged<T>) <= sizeof(Slot<T>));
  extern __shared__ __align__(1024) unsigned char dynamic[];
  Slot<T>* const slots = reinterpret_cast<Slot<T>*>(dynamic);
  AfterSlots<T>& after = *reinterpret_cast<AfterSlots<T>*>(slots + job.inputs);
  const Shape& shape = job.shape;
  const Tile tile = FindTile(shape, gridDim.x - 1 - blockIdx.x);
  const ThreadCoord<T> coord(tile);
  WaitForPrimary();
  if (shape.aligned) {
    const uint32_t barrier = SharedAddress(&after.barrier);
    if (threadIdx.x == 0) {
      BarrierInit(barrier, 1);
      BarrierInitFence();
      BarrierExpect(barrier, job.inputs * sizeof(TileVectors<T>));
      for (int i = 0; i < job.inputs; ++i) {
        LoadBox(SharedAddress(slots[i].values), &job.input_maps[i], tile.col * kTile, tile.row * kTile, tile.example,
                barrier);
      }
    }
    __syncthreads();  // the barrier is there
    BarrierWait(barrier, 0);
  } else {
    for (int i = 0; i < job.inputs; ++i) {
      Patch<T> patch;
      Load<T>(static_cast<const T*>(job.input[i]) + tile.Example(shape), shape, coord, patch);
#pragma unroll
      for (int v = 0; v < Words<T>::kVectors; ++v) {
#pragma unroll
        for (int r = 0; r < kPatch; ++r) {
          const uint32_t* words = patch[r] + 4 * v;
          slots[i].values[coord.down * kPatch + r][v * kAcross + coord.across] =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
  compute(tile, coord, TilesInSlots<T>{slots});
  for (int i = 0; i < job.results; ++i) {
    EncodeAny<T, kBlocks>(job, i, tile, slots[job.result[i].slot], after.scratch);
  }
  if (threadIdx.x == 0) BulkWaitRead();
}

// The same with one slot, in which results take turns.
template <typename T, int kBlocks, typename Compute>
__global__ void __launch_bounds__(kThreads, kBlocks)
    ComputeTilesInTurn(const __grid_constant__ TileJob job, const __grid_constant__ Compute compute) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  Slot<T>& slot = *reinterpret_cast<Slot<T>*>(dynamic);
  AfterSlots<T>& after = *reinterpret_cast<AfterSlots<T>*>(&slot + 1);
  const Tile tile = FindTile(job.shape, gridDim.x - 1 - blockIdx.x);
  const ThreadCoord<T> coord(tile);
  WaitForPrimary();
  for (int i = 0; i < job.results; ++i) {
    compute(tile, coord, TilesInMemory<T>{job, tile, slot, job.result[i].slot});
    EncodeAny<T, kBlocks>(job, i, tile, slot, after.scratch);
    if (threadIdx.x == 0) BulkWaitRead();
    __syncthreads();  // codes have left the slot
  }
}

// Collects the inputs and results of a launch.
class TileLaunch {
 public:
  // Inputs that are null are left out. All have the shape and dtype of x.
  TileLaunch(const Matrices& x, std::initializer_list<const void*> inputs) : x_(x) {
    for (const void* input : inputs) {
      if (input) job_.input[job_.inputs++] = input;
    }
    job_.shape = ShapeOf(x_, inputs);
  }

  int inputs() const { return job_.inputs; }

  // A result that the kernel leaves in a slot. No copies: no result.
  template <typename Scaling>
  void Add(int slot, const Copies& copies, const Scaling& scaling) {
    if (!copies.data && !copies.transposed) return;
    ResultTile& result = job_.result[job_.results++];
    result = {slot, copies.format, Scaled::kTensor, ArgumentsOf(x_, copies)};
    job_.shape.aligned &= result.arguments.shape.aligned;
    if constexpr (std::is_same_v<Scaling, TensorScaling>) {
      result.arguments.tensor = scaling;
      if (scaling.own_amax) own_amaxes_[own_amax_count_++] = scaling.own_amax;
    } else {
      // An absent copy counts as one with scales of 128×128, which cost least.
      const bool data = !copies.data || scaling.data_128x128;
      const bool transposed = !copies.transposed || scaling.transposed_128x128;
      result.scaled = data ? (transposed ? Scaled::kBoth128 : Scaled::kData128)
                           : (transposed ? Scaled::kTransposed128 : Scaled::kNone128);
      result.arguments.blocks = scaling;
    }
  }

  // With `kBlocks` blocks on a multiprocessor where values have 16 bits; float32 tiles are twice as large.
  template <int kBlocks, typename Compute>
  Status Run(cudaStream_t stream, const Compute& compute) {
    if (Status s = CheckSize(x_); !s.ok()) return s;
    for (int i = 0; i < own_amax_count_; i += 2) {
      const Span second{i + 1 < own_amax_count_ ? own_amaxes_[i + 1] : nullptr, x_.count};
      if (Status s = Clear(stream, {own_amaxes_[i], x_.count}, second); !s.ok()) return s;
    }
    return x_.dtype == DType::kFloat32 ? Launch<float, 2>(stream, compute)
                                       : Launch<__nv_bfloat16, kBlocks>(stream, compute);
  }

 private:
  template <typename T, int kBlocks, typename Compute>
  Status Launch(cudaStream_t stream, const Compute& compute) {
    bool described = true;
    for (int i = 0; i < job_.inputs && job_.shape.aligned; ++i) {
      described &= DescribeValues<T>(job_.input[i], job_.shape, &job_.input_maps[i]);
    }
    for (int i = 0; i < job_.results; ++i) {
      job_.result[i].arguments.shape = job_.shape;
      if (job_.shape.aligned) described &= DescribeCopies<T>(job_.result[i].arguments, &job_.result_maps[i]);
    }
    if (!described) return Status::Failed("cuTensorMapEncodeTiled refuses an input or a copy of a result");
    if constexpr (SharedBytes<T>(Compute::kMostInputs) > kLeastSharedBytes) {
      int most = 0;
      if (Status s = CountSharedBytes(&most); !s.ok()) return s;
      if (SharedBytes<T>(job_.inputs) > most) {
        return LaunchBlocks<ComputeTilesInTurn<T, kBlocks, Compute>, SharedBytes<T>(1)>(
            stream, job_.shape.Tiles(), SharedBytes<T>(1), job_, compute);
      }
    }
    return LaunchBlocks<ComputeTiles<T, kBlocks, Compute>, SharedBytes<T>(kMostTiles)>(
        stream, job_.shape.Tiles(), SharedBytes<T>(job_.inputs), job_, compute);
  }

  Matrices x_;
  TileJob job_{};
  float* own_amaxes_[kMostTiles] = {};
  int own_amax_count_ = 0;
};

}  // namespace te::quantize
