// One pass over the inputs, where scales are known or those of blocks: a thread block loads its tile of 128 × 128
// values of every input by TMA, computes the results over them in shared memory, and encodes one after another with the
// quantizing kernel's EncodeTile, whose codes take the place of the values. The stores of one result run while the next
// is encoded.
//
// Bytes per bfloat16 value of y: forward 4 for gate and up, and 1 for each FP8 copy; backward 6 for gate, up and dy, 4
// for both copies of both gradients, and 1 for y again. At 8192 × 14336 values and 3.0 TB/s (H100) that is 196 µs for
// one copy of y, 235 for both, 391 for the gradients, 431 with y. Current scaling reads all inputs once more before,
// for the amaxes. Arithmetic: about 25 instructions a value forward and 45 backward, less than half of that time.
//
// Three blocks share a multiprocessor forward and two backward, as their tiles fit into shared memory: while one waits
// for TMA, others compute.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "activation/activation.h"
#include "activation/functions.cuh"
#include "common/cuda_status.h"
#include "common/dependent_launch.cuh"
#include "common/once_per_device.h"
#include "common/tma.cuh"
#include "common/vector.cuh"
#include "quantize/amax.cuh"
#include "quantize/kernel.cuh"
#include "quantize/launch.cuh"

namespace te::activation {
namespace {

using namespace quantize;

inline constexpr int kMostTiles = 3;  // of inputs, and of results

enum class Scaled { kTensor, kData128, kTransposed128, kBoth128, kNone128 };

// A result: which tile holds it, and how it is encoded.
struct ResultTile {
  int slot;
  Fp8 format;
  Scaled scaled;
  quantize::Arguments arguments;
};

struct Parameters {
  Function function;
  Shape shape;
  bool gated;
  int inputs;  // tiles: gate, up where gated, dy backward
  int results;
  const void* input[kMostTiles];
  CUtensorMap input_maps[kMostTiles];
  ResultTile result[kMostTiles];
  TensorMaps result_maps[kMostTiles];
};

template <typename T>
struct alignas(1024) Slot {
  TileVectors<T> values;
};

// In shared memory, after the slots.
template <typename T>
struct Rest {
  Scratch<T> scratch;
  uint64_t barrier;
};

template <typename T>
constexpr int SharedBytes(int inputs) {
  return inputs * sizeof(Slot<T>) + sizeof(Rest<T>);
}

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

// Results of one vector of every input, in place: slots are gate, up where gated, dy backward.
template <typename T, Kind kKind, bool kGated, bool kBackward>
__device__ __forceinline__ void ApplyToVectors(const Function& function, uint4 (&vectors)[kMostTiles]) {
  constexpr int kCount = kPer16Bytes<T>;
  constexpr int kDy = kGated ? 2 : 1;
  float gate[kCount], up[kCount], dy[kCount];
  const T* const type = nullptr;
  Unpack(vectors[0], gate, type);
  if constexpr (kGated) Unpack(vectors[1], up, type);
  if constexpr (kBackward) Unpack(vectors[kDy], dy, type);
  Apply<kKind, kGated, kBackward>(function, gate, up, dy);
  vectors[0] = Pack(gate, type);
  if constexpr (kGated && kBackward) vectors[1] = Pack(up, type);
  if constexpr (kBackward) vectors[kDy] = Pack(dy, type);
}

template <typename T, bool kBackward>
__device__ __forceinline__ void ComputeTile(const Parameters& parameters, const Place<T>& place, Slot<T>* slots) {
  Dispatch(parameters.function.kind, parameters.gated, [&]<Kind kKind, bool kGated>() {
    constexpr int kInputs = 1 + kGated + kBackward, kResults = kBackward ? kInputs : 1;
#pragma unroll 2
    for (int r = 0; r < kPatch; ++r) {
#pragma unroll
      for (int v = 0; v < Words<T>::kVectors; ++v) {
        const int row = place.down * kPatch + r, vector = v * kAcross + place.across;
        uint4 vectors[kMostTiles];
#pragma unroll
        for (int i = 0; i < kInputs; ++i) vectors[i] = slots[i].values[row][vector];
        ApplyToVectors<T, kKind, kGated, kBackward>(parameters.function, vectors);
#pragma unroll
        for (int i = 0; i < kResults; ++i) slots[i].values[row][vector] = vectors[i];
      }
    }
  });
}

// Encodes the tile of a result, over itself. Not inlined: kernels would be compiled for each combination of results.
template <typename T, bool kBackward, typename F, typename M>
__device__ __noinline__ void EncodeResult(const TensorMaps& maps, const quantize::Arguments& arguments,
                                          const Tile& tile, Slot<T>& slot, Scratch<T>& scratch) {
  const Place<T> place(tile);
  float scale = 1.0f;
  uint32_t seen = kQuietNaN;
  if constexpr (M::scales == Scales::kTensor) {
    scale = ScaleOfTensor<F>(arguments, tile);
    if (arguments.tensor.own_amax) seen = AmaxSoFar(arguments, tile);
  }
  Patch<T> patch;
  ReadPatch<T>(slot.values, place, patch);
  if constexpr (M::scales == Scales::kTensor) __syncthreads();  // all have read theirs
  EncodeTile<T, F, M>(maps, arguments, tile, place, patch, scale, seen, scratch, reinterpret_cast<Staged<T>&>(slot));
}

template <typename T, bool kBackward, typename F>
__device__ __forceinline__ void EncodeScaled(const TensorMaps& maps, const ResultTile& result, const Tile& tile,
                                             Slot<T>& slot, Scratch<T>& scratch) {
  switch (result.scaled) {
    case Scaled::kTensor:
      return EncodeResult<T, kBackward, F, Mode<Scales::kTensor>>(maps, result.arguments, tile, slot, scratch);
    case Scaled::kNone128:
      return EncodeResult<T, kBackward, F, Mode<Scales::kBlocks, false, false>>(maps, result.arguments, tile, slot,
                                                                                scratch);
    case Scaled::kData128:
      return EncodeResult<T, kBackward, F, Mode<Scales::kBlocks, true, false>>(maps, result.arguments, tile, slot,
                                                                               scratch);
    case Scaled::kTransposed128:
      return EncodeResult<T, kBackward, F, Mode<Scales::kBlocks, false, true>>(maps, result.arguments, tile, slot,
                                                                               scratch);
    case Scaled::kBoth128:
      return EncodeResult<T, kBackward, F, Mode<Scales::kBlocks, true, true>>(maps, result.arguments, tile, slot,
                                                                              scratch);
  }
}

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kThreads, kBackward ? 2 : kQuantizeBlocks<T>)
    ActivateTile(const __grid_constant__ Parameters parameters) {
  static_assert(sizeof(Staged<T>) <= sizeof(Slot<T>));
  extern __shared__ __align__(1024) unsigned char dynamic[];
  Slot<T>* const slots = reinterpret_cast<Slot<T>*>(dynamic);
  Rest<T>& rest = *reinterpret_cast<Rest<T>*>(slots + parameters.inputs);
  const Shape& shape = parameters.shape;
  const Tile tile = FindTile(shape, gridDim.x - 1 - blockIdx.x);
  const Place<T> place(tile);
  WaitForPrimary();
  if (shape.aligned) {
    const uint32_t barrier = SharedAddress(&rest.barrier);
    if (threadIdx.x == 0) {
      BarrierInit(barrier, 1);
      BarrierInitFence();
      BarrierExpect(barrier, parameters.inputs * sizeof(TileVectors<T>));
      for (int i = 0; i < parameters.inputs; ++i) {
        LoadBox(SharedAddress(slots[i].values), &parameters.input_maps[i], tile.col * kTile, tile.row * kTile,
                tile.example, barrier);
      }
    }
    __syncthreads();  // the barrier is there
    BarrierWait(barrier, 0);
  } else {
    for (int i = 0; i < parameters.inputs; ++i) {
      Patch<T> patch;
      Load<T>(static_cast<const T*>(parameters.input[i]) + tile.Example(shape), shape, place, patch);
#pragma unroll
      for (int v = 0; v < Words<T>::kVectors; ++v) {
#pragma unroll
        for (int r = 0; r < kPatch; ++r) {
          const uint32_t* words = patch[r] + 4 * v;
          slots[i].values[place.down * kPatch + r][v * kAcross + place.across] =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
  ComputeTile<T, kBackward>(parameters, place, slots);
  for (int i = 0; i < parameters.results; ++i) {
    const ResultTile& result = parameters.result[i];
    if (result.format == Fp8::kE4M3) {
      EncodeScaled<T, kBackward, E4M3>(parameters.result_maps[i], result, tile, slots[result.slot], rest.scratch);
    } else {
      EncodeScaled<T, kBackward, E5M2>(parameters.result_maps[i], result, tile, slots[result.slot], rest.scratch);
    }
  }
  if (threadIdx.x == 0) BulkWaitRead();
}

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
    auto* launch = inputs.dtype == DType::kFloat32    ? LaunchAmax<float, kBackward>
                   : inputs.dtype == DType::kBFloat16 ? LaunchAmax<__nv_bfloat16, kBackward>
                                                      : LaunchAmax<__half, kBackward>;
    return launch(executor.stream, function, inputs, dy, amax, up_amax);
  };
  return dy ? with.template operator()<true>() : with.template operator()<false>();
}

// ------------------------------------------------------------------------------------------------------------ launches

void SetScaling(ResultTile& result, const TensorScaling& scaling) {
  result.scaled = Scaled::kTensor;
  result.arguments.tensor = scaling;
}

void SetScaling(ResultTile& result, const BlockScaling& scaling) {
  // An absent copy counts as one with scales of 128×128, which cost least.
  const bool data = !result.arguments.data || scaling.data_128x128;
  const bool transposed = !result.arguments.transposed || scaling.transposed_128x128;
  result.scaled = data ? (transposed ? Scaled::kBoth128 : Scaled::kData128)
                       : (transposed ? Scaled::kTransposed128 : Scaled::kNone128);
  result.arguments.blocks = scaling;
}

template <typename T, bool kBackward>
Status Launch(cudaStream_t stream, Parameters& parameters) {
  bool described = true;
  for (int i = 0; i < parameters.inputs && parameters.shape.aligned; ++i) {
    described &= DescribeValues<T>(parameters.input[i], parameters.shape, &parameters.input_maps[i]);
  }
  for (int i = 0; i < parameters.results; ++i) {
    parameters.result[i].arguments.shape = parameters.shape;
    if (parameters.shape.aligned) {
      described &= DescribeCopies<T>(parameters.result[i].arguments, &parameters.result_maps[i]);
    }
  }
  if (!described) return Status::Failed("cuTensorMapEncodeTiled refuses an input or a copy of a result");
  static OncePerDevice attributes;
  const cudaError_t error = attributes.Run([] {
    const cudaError_t error = cudaFuncSetAttribute(
        ActivateTile<T, kBackward>, cudaFuncAttributeMaxDynamicSharedMemorySize, SharedBytes<T>(2 + kBackward));
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(ActivateTile<T, kBackward>, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
  });
  if (Status s = Check(error, "cudaFuncSetAttribute"); !s.ok()) return s;
  const Shape& shape = parameters.shape;
  const int64_t tiles = int64_t{shape.count} * shape.TilesDown() * shape.TilesAcross();
  return Check(LaunchAsDependent(ActivateTile<T, kBackward>, static_cast<unsigned>(tiles), kThreads,
                                 SharedBytes<T>(parameters.inputs), stream, parameters),
               "kernel launch");
}

// Collects inputs and results of a launch.
class Activation {
 public:
  Activation(const Function& function, const Inputs& inputs, const void* dy)
      : x_{inputs.dtype, inputs.gate, inputs.count, inputs.rows, inputs.cols}, backward_(dy != nullptr) {
    parameters_.function = function;
    parameters_.gated = inputs.up != nullptr;
    for (const void* input : {inputs.gate, inputs.up, dy}) {
      if (input) parameters_.input[parameters_.inputs++] = input;
    }
    parameters_.shape = ShapeOf(x_, {inputs.gate, inputs.up, dy});
  }

  int last_slot() const { return parameters_.inputs - 1; }

  // A result that the kernel leaves in the slot of an input. No copies: no result.
  template <typename Scaling>
  void Add(int slot, const Copies& copies, const Scaling& scaling) {
    if (!copies.data && !copies.transposed) return;
    ResultTile& result = parameters_.result[parameters_.results++];
    result = {slot, copies.format, Scaled::kTensor, ArgumentsOf(x_, copies)};
    parameters_.shape.aligned &= result.arguments.shape.aligned;
    SetScaling(result, scaling);
    if constexpr (std::is_same_v<Scaling, TensorScaling>) {
      if (scaling.own_amax) own_amaxes_[own_amax_count_++] = scaling.own_amax;
    }
  }

  Status Run(cudaStream_t stream) {
    if (Status s = CheckSize(x_); !s.ok()) return s;
    for (int i = 0; i < own_amax_count_; i += 2) {
      Span second{i + 1 < own_amax_count_ ? own_amaxes_[i + 1] : nullptr, x_.count};
      if (Status s = Clear(stream, {own_amaxes_[i], x_.count}, second); !s.ok()) return s;
    }
    auto with = [&]<bool kBackward>() {
      auto* launch = x_.dtype == DType::kFloat32    ? Launch<float, kBackward>
                     : x_.dtype == DType::kBFloat16 ? Launch<__nv_bfloat16, kBackward>
                                                    : Launch<__half, kBackward>;
      return launch(stream, parameters_);
    };
    return backward_ ? with.template operator()<true>() : with.template operator()<false>();
  }

 private:
  Matrices x_;
  bool backward_;
  Parameters parameters_{};
  float* own_amaxes_[kMostTiles] = {};
  int own_amax_count_ = 0;
};

template <typename Scaling>
Status Result(const Executor& executor, const Function& function, const Inputs& inputs, const Copies& copies,
              const Scaling& scaling) {
  Activation activation(function, inputs, nullptr);
  activation.Add(0, copies, scaling);
  return activation.Run(executor.stream);
}

template <typename Scaling>
Status Gradients(const Executor& executor, const Function& function, const Inputs& inputs, const void* dy,
                 const Outputs<Scaling>& outputs) {
  Activation activation(function, inputs, dy);
  activation.Add(0, outputs.gate.copies, outputs.gate.scaling);
  if (inputs.up) activation.Add(1, outputs.up.copies, outputs.up.scaling);
  activation.Add(activation.last_slot(), outputs.y.copies, outputs.y.scaling);
  return activation.Run(executor.stream);
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
  return Result(executor, function, inputs, copies, scaling);
}

Status ResultInBlocks(const Executor& executor, const Function& function, const Inputs& inputs, const Copies& copies,
                      const BlockScaling& scaling) {
  return Result(executor, function, inputs, copies, scaling);
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
