// One pass over the inputs where scales are known or those of blocks: vector by vector for y as it is, tile by tile
// (quantize/computed_tile.cuh) where a copy is transposed.
//
// Bytes per bfloat16 value of y: forward 4 for gate and up, and 1 for each FP8 copy; backward 6 for gate, up and dy, 4
// for both copies of both gradients, and 1 for y again. At 8192 × 14336 values and 3.0 TB/s (H100) that is 196 µs for
// one copy of y, 235 for both, 391 for the gradients, 431 with y. Current scaling reads all inputs once more before,
// for the amaxes. Of a copy of as many bytes that is 86 to 90% as it is with blocks, 83 to 91% for the gradients, but
// 66% for both copies with blocks, whose values are encoded twice (docs/benchmarks.md).
//
// Weights of rows are read, and sums for their gradients written, once for each tile: in the backward pass 8 bytes
// beside the 1408 of a row of a tile. Kernels without weights are compiled apart.
//
// A multiprocessor holds three blocks of a kernel with tiles in the forward pass and two in the backward pass; their
// tiles fill its shared memory. While one block waits for TMA, others compute.

#include <algorithm>
#include <cstdint>
#include <string>

#include "activation/activation.h"
#include "activation/functions.cuh"
#include "common/cuda_status.h"
#include "common/dependent_launch.cuh"
#include "common/vector.cuh"
#include "quantize/amax.cuh"
#include "quantize/computed_tile.cuh"
#include "quantize/rows.cuh"

namespace te::activation {
namespace {

using namespace quantize;

// Calls run.operator()<kKind, kGated>().
template <typename Run>
__device__ __forceinline__ void Dispatch(Kind kind, bool gated, const Run& run) {
  auto with_kind = [&]<Kind kKind>() {
    gated ? run.template operator()<kKind, true>() : run.template operator()<kKind, false>();
  };
  switch (kind) {
    case Kind::kSilu:
      return with_kind.template operator()<Kind::kSilu>();
    case Kind::kGelu:
      return with_kind.template operator()<Kind::kGelu>();
    case Kind::kRelu:
      return with_kind.template operator()<Kind::kRelu>();
    case Kind::kSquaredRelu:
      return with_kind.template operator()<Kind::kSquaredRelu>();
  }
}

template <int kCount>
__device__ __forceinline__ void Scale(float factor, float (&values)[kCount]) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] *= factor;
}

// Results of one vector of every input, in place: slots are gate, up where gated, dy backward. If weighted, those of y
// times a weight; backward it then returns the sum of dy · y, of y without the weight.
template <typename T, Kind kKind, bool kGated, bool kBackward, bool kWeighted = false>
__device__ __forceinline__ float ApplyToVectors(const Function& function, uint4 (&vectors)[kMostTiles],
                                                float weight = 1.0f) {
  constexpr int kCount = kPer16Bytes<T>;
  constexpr int kDy = kGated ? 2 : 1;
  float gate[kCount], up[kCount], dy[kCount], sum = 0.0f;
  const T* const type = nullptr;
  Unpack(vectors[0], gate, type);
  if constexpr (kGated) Unpack(vectors[1], up, type);
  if constexpr (kBackward) Unpack(vectors[kDy], dy, type);
  if constexpr (kWeighted && kBackward) Scale(weight, dy);
  Apply<kKind, kGated, kBackward>(function, gate, up, dy);
  if constexpr (kWeighted && kBackward) {
    float own_dy[kCount];
    Unpack(vectors[kDy], own_dy, type);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum = fmaf(own_dy[j], dy[j], sum);
  }
  if constexpr (kWeighted) Scale(weight, kBackward ? dy : gate);
  vectors[0] = Pack(gate, type);
  if constexpr (kGated && kBackward) vectors[1] = Pack(up, type);
  if constexpr (kBackward) vectors[kDy] = Pack(dy, type);
  return sum;
}

// What ComputeTiles runs: tiles are gate, up where gated, dy backward.
template <bool kBackward, bool kWeighted>
struct Activate {
  static constexpr int kMostInputs = kBackward ? 3 : 2;

  Function function;
  bool gated;
  // If weighted.
  int rows;
  int tiles_across;
  const float* weights;
  float* weight_sums;  // backward

  template <typename T, typename Tiles>
  __device__ __forceinline__ void operator()(const Tile& tile, const ThreadCoord<T>& coord, const Tiles& tiles) const {
    Dispatch(function.kind, gated, [&]<Kind kKind, bool kGated>() {
      constexpr int kInputs = 1 + kGated + kBackward, kResults = kBackward ? kInputs : 1;
#pragma unroll 2
      for (int r = 0; r < kPatch; ++r) {
        const int row = coord.down * kPatch + r;
        float weight = 1.0f, sum = 0.0f;
        if constexpr (kWeighted) {
          weight = coord.row + r < rows ? weights[RowOffset(tile.example, rows) + coord.row + r] : 0.0f;
        }
#pragma unroll
        for (int v = 0; v < Words<T>::kVectors; ++v) {
          const int vector = v * kAcross + coord.across;
          uint4 vectors[kMostTiles];
#pragma unroll
          for (int i = 0; i < kInputs; ++i) vectors[i] = tiles.Get(i, row, vector);
          sum += ApplyToVectors<T, kKind, kGated, kBackward, kWeighted>(function, vectors, weight);
#pragma unroll
          for (int i = 0; i < kResults; ++i) tiles.Set(i, row, vector, vectors[i]);
        }
        if constexpr (kWeighted && kBackward) {
#pragma unroll
          for (int mask = kAcross / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, mask);
          if (coord.across == 0 && coord.row + r < rows) {
            weight_sums[RowOffset(tile.example * tiles_across + tile.col, rows) + coord.row + r] = sum;
          }
        }
      }
    });
  }
};

// -------------------------------------------------------------------------------------------------------------- amaxes

inline constexpr int kActivationUnroll = 2;  // vectors of each input that a thread has in flight

// The amax of y, or those of both gradients; [example] each.
template <typename T, bool kBackward>
__global__ void __launch_bounds__(kAmaxThreads, kAmaxBlocks)
    AmaxOfActivation(const Function function, const T* gate, const T* up, const T* dy, int64_t count, unsigned blocks,
                     bool aligned, float* amax, float* up_amax) {
  using W = Words<T>;
  const unsigned example = blockIdx.x / blocks, block = blockIdx.x % blocks;
  const T* inputs[kMostTiles] = {gate, up ? up : dy, up ? dy : nullptr};
#pragma unroll
  for (int i = 0; i < kMostTiles; ++i) {
    if (inputs[i]) inputs[i] += example * count;
  }
  uint32_t largest[2] = {};
  WaitForPrimary();
  Dispatch(function.kind, up != nullptr, [&]<Kind kKind, bool kGated>() {
    constexpr int kInputs = 1 + kGated + kBackward, kResults = kGated && kBackward ? 2 : 1;
    auto add = [&](uint4(&vectors)[kMostTiles]) {
      ApplyToVectors<T, kKind, kGated, kBackward>(function, vectors);
#pragma unroll
      for (int i = 0; i < kResults; ++i) {
        const uint4& bits = vectors[i];
        const uint32_t low = W::Max(W::Magnitudes(bits.x), W::Magnitudes(bits.y));
        const uint32_t high = W::Max(W::Magnitudes(bits.z), W::Magnitudes(bits.w));
        largest[i] = W::Max(largest[i], W::Max(low, high));
      }
    };
    const int64_t vector_count = aligned ? count / W::kPerVector : 0;
    const int64_t stride = int64_t{blocks} * kAmaxThreads;
    int64_t v = int64_t{block} * kAmaxThreads + threadIdx.x;
    for (; v + (kActivationUnroll - 1) * stride < vector_count; v += kActivationUnroll * stride) {
      uint4 vectors[kActivationUnroll][kMostTiles];
#pragma unroll
      for (int u = 0; u < kActivationUnroll; ++u) {
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
          vectors[u][i] = LoadStreaming(reinterpret_cast<const uint4*>(inputs[i]) + v + u * stride);
        }
      }
#pragma unroll
      for (int u = 0; u < kActivationUnroll; ++u) add(vectors[u]);
    }
    for (; v < vector_count; v += stride) {
      uint4 vectors[kMostTiles];
#pragma unroll
      for (int i = 0; i < kInputs; ++i) vectors[i] = LoadStreaming(reinterpret_cast<const uint4*>(inputs[i]) + v);
      add(vectors);
    }
    // The rest one by one, each as the first value of a vector of zeros.
    for (int64_t j = vector_count * W::kPerVector + int64_t{block} * kAmaxThreads + threadIdx.x; j < count;
         j += stride) {
      uint4 vectors[kMostTiles] = {};
#pragma unroll
      for (int i = 0; i < kInputs; ++i) *reinterpret_cast<T*>(&vectors[i]) = inputs[i][j];
      add(vectors);
    }
  });
  __shared__ uint32_t of_warps[2][kAmaxThreads / 32];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t of_warp = __reduce_max_sync(kWholeWarp, W::Single(largest[i]));
    if (threadIdx.x % 32 == 0) of_warps[i][threadIdx.x / 32] = of_warp;
  }
  __syncthreads();
  const int i = threadIdx.x / 32;
  if (i < 2) {
    const int warp = threadIdx.x % 32;
    const uint32_t of_block = __reduce_max_sync(kWholeWarp, warp < kAmaxThreads / 32 ? of_warps[i][warp] : 0);
    float* const to = i == 0 ? amax : up_amax;
    if (warp == 0 && to) AtomicMax(to + example, W::FloatBitsOf(of_block));
  }
}

template <typename T, bool kBackward>
Status LaunchAmax(cudaStream_t stream, const Function& function, const Inputs& inputs, const void* dy, float* amax,
                  float* up_amax) {
  int multiprocessors = 0;
  if (Status s = CountMultiprocessors(&multiprocessors); !s.ok()) return s;
  const int64_t values = inputs.rows * inputs.cols;
  const int64_t chunk = int64_t{kAmaxThreads} * kPer16Bytes<T>;
  const int64_t slots = int64_t{multiprocessors} * kAmaxBlocks;
  const int64_t blocks = std::clamp<int64_t>(slots / inputs.count, 1, (values + chunk - 1) / chunk);
  const bool aligned = OnSixteenBytes(inputs.gate) && OnSixteenBytes(inputs.up) && OnSixteenBytes(dy) &&
                       (inputs.count == 1 || values % kPer16Bytes<T> == 0);
  return Check(
      LaunchAsDependent(AmaxOfActivation<T, kBackward>, static_cast<unsigned>(inputs.count * blocks), kAmaxThreads, 0,
                        stream, function, static_cast<const T*>(inputs.gate), static_cast<const T*>(inputs.up),
                        static_cast<const T*>(dy), values, static_cast<unsigned>(blocks), aligned, amax, up_amax),
      "kernel launch");
}

Status Amaxes(const Executor& executor, const Function& function, const Inputs& inputs, const void* dy, float* amax,
              float* up_amax) {
  if (inputs.count > INT32_MAX / 1024) {
    return Status::Failed("gate has " + std::to_string(inputs.count) + " tensors; 2^21 are too many");
  }
  if (Status s = Clear(executor.stream, {amax, inputs.count}, {up_amax, inputs.count}); !s.ok()) return s;
  auto with = [&]<bool kBackward>() {
    auto* launch =
        inputs.dtype == DType::kFloat32 ? LaunchAmax<float, kBackward> : LaunchAmax<__nv_bfloat16, kBackward>;
    return launch(executor.stream, function, inputs, dy, amax, up_amax);
  };
  return dy ? with.template operator()<true>() : with.template operator()<false>();
}

// ---------------------------------------------------------------------------------------------------------------- rows

inline constexpr int kRowVectors = 4;  // of each input that a thread has in flight; one with few rows

// y as it is. A thread block takes kVectors vectors a thread of one row. If weighted, rows may have weights.
template <typename T, bool kWeighted, int kVectors>
__global__ void __launch_bounds__(kRowThreads)
    ActivateRows(const __grid_constant__ Function function, const __grid_constant__ Inputs inputs,
                 const __grid_constant__ RowOutputs outputs, unsigned strips) {
  constexpr int kCount = kPer16Bytes<T>;
  __shared__ uint32_t amax_of_warps[32];
  const unsigned row = blockIdx.x / strips, rows = static_cast<unsigned>(inputs.rows), example = row / rows;
  const int vectors = static_cast<int>(inputs.cols / kCount);
  const int first = static_cast<int>(blockIdx.x % strips * kVectors * blockDim.x + threadIdx.x);
  WaitForPrimary();
  if constexpr (kVectors == 1) ReleaseDependents();
  RowEncoder<T> encode(outputs, example, inputs.rows, inputs.cols, blockIdx.x % (rows * strips) == 0);
  const float weight = kWeighted && inputs.weights ? inputs.weights[row] : 1.0f;
  Dispatch(function.kind, inputs.up != nullptr, [&]<Kind kKind, bool kGated>() {
    const void* const arrays[2] = {inputs.gate, inputs.up};
    uint4 loaded[kVectors][kMostTiles] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = first + i * blockDim.x;
      if (v >= vectors) continue;
#pragma unroll
      for (int a = 0; a <= kGated; ++a) {
        loaded[i][a] = LoadStreaming(static_cast<const uint4*>(arrays[a]) + int64_t{row} * vectors + v);
      }
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = first + i * blockDim.x;
      float y[kCount], up[kCount], dy[kCount];
      Unpack(loaded[i][0], y, static_cast<const T*>(nullptr));
      Unpack(loaded[i][1], up, static_cast<const T*>(nullptr));
      Apply<kKind, kGated, false>(function, y, up, dy);
      if constexpr (kWeighted) Scale(weight, y);
      if (v >= vectors) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) y[j] = 0.0f;
      }
      encode(row % rows, v, v < vectors ? kCount : 0, y);
    }
  });
  encode.RaiseAmax(amax_of_warps);
}

template <typename T>
Status LaunchRows(cudaStream_t stream, const Function& function, const Inputs& inputs, const RowOutputs& outputs) {
  int multiprocessors = 0;
  TE_JAX_TRY(CountMultiprocessors(&multiprocessors));
  const int64_t vectors = inputs.cols / kPer16Bytes<T>, rows = inputs.count * inputs.rows;
  RowStrips strips(vectors, kRowVectors);
  auto* kernel = inputs.weights ? ActivateRows<T, true, kRowVectors> : ActivateRows<T, false, kRowVectors>;
  if (rows * strips.count < multiprocessors) {
    strips = RowStrips::OfSingleVectors(rows, vectors, multiprocessors);
    kernel = ActivateRows<T, true, 1>;
  }
  return Check(
      LaunchAsDependent(kernel, static_cast<unsigned>(rows * strips.count), static_cast<unsigned>(strips.threads), 0,
                        stream, function, inputs, outputs, static_cast<unsigned>(strips.count)),
      "kernel launch");
}

Status Rows(const Executor& executor, const Function& function, const Inputs& inputs, const RowOutputs& outputs) {
  if (outputs.amax) {
    if (Status s = Clear(executor.stream, {outputs.amax, inputs.count}); !s.ok()) return s;
  }
  auto* launch = inputs.dtype == DType::kFloat32 ? LaunchRows<float> : LaunchRows<__nv_bfloat16>;
  return launch(executor.stream, function, inputs, outputs);
}

// Whether rows are made of aligned vectors, no more than one launch takes.
bool InRows(const Inputs& inputs, const Copies& copies) {
  const int64_t per_vector = inputs.dtype == DType::kFloat32 ? 4 : 8;
  return copies.data && !copies.transposed && inputs.cols % per_vector == 0 && OnSixteenBytes(inputs.gate) &&
         OnSixteenBytes(inputs.up) && inputs.count * inputs.rows < INT32_MAX / (1 + inputs.cols / 1024);
}

// ------------------------------------------------------------------------------------------------------------ launches

Matrices GateOf(const Inputs& inputs) { return {inputs.dtype, inputs.gate, inputs.count, inputs.rows, inputs.cols}; }

template <int kBlocks, bool kBackward>
Status RunTiles(cudaStream_t stream, TileLaunch& launch, const Function& function, const Inputs& inputs,
                float* weight_sums) {
  const bool gated = inputs.up != nullptr;
  if (!inputs.weights) return launch.Run<kBlocks>(stream, Activate<kBackward, false>{function, gated});
  // CheckSize refuses sizes that are no int before a kernel runs.
  const int rows = static_cast<int>(inputs.rows), across = static_cast<int>((inputs.cols + kTile - 1) / kTile);
  return launch.Run<kBlocks>(stream,
                             Activate<kBackward, true>{function, gated, rows, across, inputs.weights, weight_sums});
}

template <typename Scaling>
Status Result(const Executor& executor, const Function& function, const Inputs& inputs, const Copies& copies,
              const Scaling& scaling) {
  TileLaunch launch(GateOf(inputs), {inputs.gate, inputs.up});
  launch.Add(0, copies, scaling);
  return RunTiles<3, false>(executor.stream, launch, function, inputs, nullptr);
}

template <typename Scaling>
Status Gradients(const Executor& executor, const Function& function, const Inputs& inputs, const void* dy,
                 const Outputs<Scaling>& outputs) {
  TileLaunch launch(GateOf(inputs), {inputs.gate, inputs.up, dy});
  launch.Add(0, outputs.gate.copies, outputs.gate.scaling);
  if (inputs.up) launch.Add(1, outputs.up.copies, outputs.up.scaling);
  launch.Add(launch.inputs() - 1, outputs.y.copies, outputs.y.scaling);
  return RunTiles<2, true>(executor.stream, launch, function, inputs, outputs.weight_sums);
}

}  // namespace

Status AmaxOfResult(const Executor& executor, const Function& function, const Inputs& inputs, float* amax) {
  return Amaxes(executor, function, inputs, nullptr, amax, nullptr);
}

Status AmaxOfGradients(const Executor& executor, const Function& function, const Inputs& inputs, const void* dy,
                       float* gate_amax, float* up_amax) {
  return Amaxes(executor, function, inputs, dy, gate_amax, up_amax);
}

Status ResultInTensor(const Executor& executor, const Function& function, const Inputs& inputs, const Copies& copies,
                      const TensorScaling& scaling) {
  if (!InRows(inputs, copies)) return Result(executor, function, inputs, copies, scaling);
  return Rows(
      executor, function, inputs,
      {copies.format, copies.power_of_two_scales, copies.data, scaling.amax, scaling.scale_inv, scaling.own_amax});
}

Status ResultInBlocks(const Executor& executor, const Function& function, const Inputs& inputs, const Copies& copies,
                      const BlockScaling& scaling) {
  if (scaling.data_128x128 || !InRows(inputs, copies)) return Result(executor, function, inputs, copies, scaling);
  return Rows(executor, function, inputs,
              {copies.format, copies.power_of_two_scales, copies.data, nullptr, scaling.scale_inv, nullptr});
}

Status GradientsInTensors(const Executor& executor, const Function& function, const Inputs& inputs, const void* dy,
                          const Outputs<TensorScaling>& outputs) {
  return Gradients(executor, function, inputs, dy, outputs);
}

Status GradientsInBlocks(const Executor& executor, const Function& function, const Inputs& inputs, const void* dy,
                         const Outputs<BlockScaling>& outputs) {
  return Gradients(executor, function, inputs, dy, outputs);
}

}  // namespace te::activation
