// XLA's pool of CPU threads computes the result, or the gradients, as arrays of the inputs' dtype. Those are quantized
// as any other array.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "activation/activation.h"
#include "common/cpu_float.h"
#include "common/cpu_math.h"

namespace te::activation {
namespace {

constexpr int64_t kChunk = 512;  // values that stay in the L1 cache from the first loop over them to the last
constexpr int64_t kChunksPerTask = 32;

// -------------------------------------------------------------------------------------------------------------- loops

struct Sigmoid {
  float value;
  float rest;  // 1 - value, without cancellation
};

TE_JAX_INLINE Sigmoid SigmoidOf(float x) {
  const float decay = Exp(-std::fabs(x));
  const float larger = 1.0f / (1.0f + decay), smaller = decay * larger;
  return {x < 0.0f ? smaller : larger, x < 0.0f ? larger : smaller};
}

// x · sigmoid(z) and its derivative, where z has the derivative dz.
TE_JAX_INLINE void TimesSigmoid(float x, float z, float dz, float* value, float* slope) {
  const Sigmoid sigmoid = SigmoidOf(z);
  *value = x * sigmoid.value;
  *slope = sigmoid.value + x * dz * (sigmoid.value * sigmoid.rest);
}

// f(x) and its derivative, in place of x and in `slopes`.
TE_JAX_CLONES void Silu(float alpha, int64_t count, float* values, float* slopes) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float x = values[i];
    TimesSigmoid(x, alpha * x, alpha, &values[i], &slopes[i]);
  }
}

TE_JAX_CLONES void Gelu(float, int64_t count, float* values, float* slopes) {
  constexpr float kSlope = 2.0f * 0.7978845608028654f, kCubic = 0.044715f;  // (1 + tanh(z)) / 2 is sigmoid(2 z)
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float x = values[i], square = x * x;
    TimesSigmoid(x, kSlope * x * (1.0f + kCubic * square), kSlope * (1.0f + 3.0f * kCubic * square), &values[i],
                 &slopes[i]);
  }
}

// Not below: NaN stays.
TE_JAX_CLONES void Relu(float, int64_t count, float* values, float* slopes) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    slopes[i] = values[i] <= 0.0f ? 0.0f : 1.0f;
    values[i] = values[i] <= 0.0f ? 0.0f : values[i];
  }
}

TE_JAX_CLONES void SquaredRelu(float, int64_t count, float* values, float* slopes) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float x = values[i] <= 0.0f ? 0.0f : values[i];
    slopes[i] = 2.0f * x;
    values[i] = x * x;
  }
}

// Working memory of one thread.
struct Scratch {
  alignas(64) float gate[kChunk];  // f of it, once it is computed
  alignas(64) float slope[kChunk];
  alignas(64) float up[kChunk];
  alignas(64) float dy[kChunk];
  alignas(64) float gate_within[kChunk];  // 1 where it was not clipped, else 0
  alignas(64) float up_within[kChunk];
};

TE_JAX_CLONES void Clip(float limit, float offset, int64_t count, Scratch& scratch) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float gate = scratch.gate[i], up = scratch.up[i];
    scratch.gate_within[i] = gate > limit ? 0.0f : 1.0f;
    scratch.up_within[i] = std::fabs(up) > limit ? 0.0f : 1.0f;
    scratch.gate[i] = gate > limit ? limit : gate;
    scratch.up[i] = (up > limit ? limit : up < -limit ? -limit : up) + offset;
  }
}

TE_JAX_CLONES void Multiply(const float* factors, int64_t count, float* values) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] *= factors[i];
}

TE_JAX_CLONES void Scale(float factor, int64_t count, float* values) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] *= factor;
}

// The sum of dy · y.
TE_JAX_CLONES float SumOfProducts(const float* values, const float* up, const float* dy, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += dy[i] * (values[i] * up[i]);
  return sum;
}

// The gradients of gate and up, in the place of slope and dy; y in that of gate.
TE_JAX_CLONES void Differentiate(int64_t count, Scratch& scratch) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = scratch.gate[i], up = scratch.up[i], dy = scratch.dy[i];
    scratch.slope[i] = scratch.gate_within[i] == 0.0f ? 0.0f : dy * up * scratch.slope[i];
    scratch.dy[i] = scratch.up_within[i] == 0.0f ? 0.0f : dy * value;
    scratch.gate[i] = value * up;
  }
}

// ------------------------------------------------------------------------------------------------------------- arrays

auto* LoopOf(Kind kind) {
  return kind == Kind::kSilu ? Silu : kind == Kind::kGelu ? Gelu : kind == Kind::kRelu ? Relu : SquaredRelu;
}

// Arrays of the inputs' shape and dtype, with no memory where they are not wanted.
struct Array {
  std::unique_ptr<std::byte[]> values;

  bool Allocate(const Inputs& inputs) {
    const int64_t bytes = inputs.count * inputs.rows * inputs.cols * ConversionOf(inputs.dtype).bytes;
    values.reset(new (std::nothrow) std::byte[bytes]);
    return values != nullptr;
  }

  quantize::Matrices Of(const Inputs& inputs) const {
    return {inputs.dtype, values.get(), inputs.count, inputs.rows, inputs.cols};
  }
};

Status OutOfMemory() { return Status::Failed("not enough memory for results in the dtype of the inputs"); }

// Calls body(scratch, first, count) for chunks, of which scratch has f(gate), its derivative, and up where there is
// one. With weights, chunks are of one row, and start at a block of 128 values.
template <typename Body>
void OverChunks(const Executor& executor, const Function& function, const Inputs& inputs, const Body& body) {
  const Conversion conversion = ConversionOf(inputs.dtype);
  auto* loop = LoopOf(function.kind);
  auto load = [&](const void* from, int64_t first, int64_t count, float* to) {
    conversion.load(static_cast<const std::byte*>(from) + first * conversion.bytes, count, to);
  };
  const int64_t total = inputs.count * inputs.rows * inputs.cols, length = inputs.weights ? inputs.cols : total;
  const int64_t chunks = (length + kChunk - 1) / kChunk;
  executor.ParallelFor(total / length * chunks, kChunksPerTask, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    std::fill_n(scratch.up, kChunk, 1.0f);
    std::fill_n(scratch.gate_within, kChunk, 1.0f);
    std::fill_n(scratch.up_within, kChunk, 1.0f);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t within = chunk % chunks * kChunk, count = std::min(kChunk, length - within);
      const int64_t first = chunk / chunks * length + within;
      load(inputs.gate, first, count, scratch.gate);
      if (inputs.up) {
        load(inputs.up, first, count, scratch.up);
        Clip(function.limit, function.offset, count, scratch);
      }
      loop(function.alpha, count, scratch.gate, scratch.slope);
      body(scratch, first, count);
    }
  });
}

// Calls quantize(y) with the result.
template <typename Quantize>
Status WithResult(const Executor& executor, const Function& function, const Inputs& inputs, const Quantize& quantize) {
  Array y;
  if (!y.Allocate(inputs)) return OutOfMemory();
  const Conversion conversion = ConversionOf(inputs.dtype);
  OverChunks(executor, function, inputs, [&](Scratch& scratch, int64_t first, int64_t count) {
    Multiply(scratch.up, count, scratch.gate);
    if (inputs.weights) Scale(inputs.weights[first / inputs.cols], count, scratch.gate);
    conversion.store(scratch.gate, count, y.values.get() + first * conversion.bytes);
  });
  return quantize(y.Of(inputs));
}

// Writes the parts of the gradient of a weight that a chunk has.
void SumWeight(const Inputs& inputs, const Scratch& scratch, int64_t first, int64_t count, float* sums) {
  constexpr int64_t kBlock = quantize::kBlock;
  static_assert(kChunk % kBlock == 0);
  const int64_t row = first / inputs.cols, example = row / inputs.rows, blocks = (inputs.cols + kBlock - 1) / kBlock;
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t block = example * blocks + (first % inputs.cols + at) / kBlock;
    sums[block * inputs.rows + row % inputs.rows] =
        SumOfProducts(scratch.gate + at, scratch.up + at, scratch.dy + at, std::min(kBlock, count - at));
  }
}

// Calls quantize(gate gradient, up gradient, y), without memory in up where the function is not gated, and in y where
// it is not wanted.
template <typename Quantize>
Status WithGradients(const Executor& executor, const Function& function, const Inputs& inputs, const void* dy,
                     bool with_y, float* weight_sums, const Quantize& quantize) {
  Array gate, up, y;
  if (!gate.Allocate(inputs) || (inputs.up && !up.Allocate(inputs)) || (with_y && !y.Allocate(inputs))) {
    return OutOfMemory();
  }
  const Conversion conversion = ConversionOf(inputs.dtype);
  OverChunks(executor, function, inputs, [&](Scratch& scratch, int64_t first, int64_t count) {
    const int64_t offset = first * conversion.bytes;
    conversion.load(static_cast<const std::byte*>(dy) + offset, count, scratch.dy);
    const float weight = inputs.weights ? inputs.weights[first / inputs.cols] : 1.0f;
    if (inputs.weights) {
      SumWeight(inputs, scratch, first, count, weight_sums);
      Scale(weight, count, scratch.dy);
    }
    Differentiate(count, scratch);
    if (inputs.weights) Scale(weight, count, scratch.gate);
    conversion.store(scratch.slope, count, gate.values.get() + offset);
    if (up.values) conversion.store(scratch.dy, count, up.values.get() + offset);
    if (y.values) conversion.store(scratch.gate, count, y.values.get() + offset);
  });
  return quantize(gate.Of(inputs), up.Of(inputs), y.Of(inputs));
}

Status Quantize(const Executor& executor, const quantize::Matrices& x, const Output<quantize::TensorScaling>& output) {
  return x.data ? quantize::QuantizeTensor(executor, x, output.copies, output.scaling) : Status::Ok();
}

Status Quantize(const Executor& executor, const quantize::Matrices& x, const Output<quantize::BlockScaling>& output) {
  return x.data ? quantize::QuantizeBlocks(executor, x, output.copies, output.scaling) : Status::Ok();
}

template <typename Scaling>
Status Gradients(const Executor& executor, const Function& function, const Inputs& inputs, const void* dy,
                 const Outputs<Scaling>& outputs) {
  const bool with_y = outputs.y.copies.transposed != nullptr;
  return WithGradients(executor, function, inputs, dy, with_y, outputs.weight_sums,
                       [&](const auto& gate, const auto& up, const auto& y) {
                         TE_JAX_TRY(Quantize(executor, gate, outputs.gate));
                         TE_JAX_TRY(Quantize(executor, up, outputs.up));
                         return Quantize(executor, y, outputs.y);
                       });
}

}  // namespace

Status AmaxOfResult(const Executor& executor, const Function& function, const Inputs& inputs, float* amax) {
  return WithResult(executor, function, inputs,
                    [&](const auto& y) { return quantize::AmaxOfTensor(executor, y, amax); });
}

Status ResultInTensor(const Executor& executor, const Function& function, const Inputs& inputs,
                      const quantize::Copies& copies, const quantize::TensorScaling& scaling) {
  return WithResult(executor, function, inputs,
                    [&](const auto& y) { return quantize::QuantizeTensor(executor, y, copies, scaling); });
}

Status ResultInBlocks(const Executor& executor, const Function& function, const Inputs& inputs,
                      const quantize::Copies& copies, const quantize::BlockScaling& scaling) {
  return WithResult(executor, function, inputs,
                    [&](const auto& y) { return quantize::QuantizeBlocks(executor, y, copies, scaling); });
}

Status AmaxOfGradients(const Executor& executor, const Function& function, const Inputs& inputs, const void* dy,
                       float* gate_amax, float* up_amax) {
  return WithGradients(executor, function, inputs, dy, false, nullptr,
                       [&](const auto& gate, const auto& up, const auto&) {
                         TE_JAX_TRY(quantize::AmaxOfTensor(executor, gate, gate_amax));
                         return up.data ? quantize::AmaxOfTensor(executor, up, up_amax) : Status::Ok();
                       });
}

Status GradientsInTensors(const Executor& executor, const Function& function, const Inputs& inputs, const void* dy,
                          const Outputs<quantize::TensorScaling>& outputs) {
  return Gradients(executor, function, inputs, dy, outputs);
}

Status GradientsInBlocks(const Executor& executor, const Function& function, const Inputs& inputs, const void* dy,
                         const Outputs<quantize::BlockScaling>& outputs) {
  return Gradients(executor, function, inputs, dy, outputs);
}

}  // namespace te::activation
