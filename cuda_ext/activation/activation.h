// Activation functions, gated or not, whose results and gradients leave as FP8. Results in the dtype of the inputs are
// XLA's: its fused loops are at the bandwidth of memory.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/executor.h"
#include "common/status.h"
#include "quantize/quantize.h"

namespace te::activation {

enum class Kind { kSilu, kGelu, kRelu, kSquaredRelu };

// With f one of
//   kSilu x · sigmoid(alpha x), kGelu 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x³))), kRelu max(x, 0), kSquaredRelu
// its square: y = f(gate), or gated
//   y = f(min(gate, limit)) (clip(up, -limit, limit) + offset),
// computed in float32 and rounded to the dtype of the inputs. The gradient is that of the values as they were clipped:
// zero beyond the limit, whole at it.
struct Function {
  Kind kind;
  float alpha;   // of kSilu
  float limit;   // of gated functions; infinite: none
  float offset;  // of gated functions
};

// `count` matrices one after another, row-major, no dimension of size zero, of one dtype.
struct Inputs {
  DType dtype;
  const void* gate;  // [count, rows, cols]
  const void* up;    // the same, or null where the function is not gated
  int64_t count;
  int64_t rows;
  int64_t cols;
  const float* weights;  // [count, rows]: factors of the rows of y, in float32 before y is rounded; or null for none
};

// Weights are for blocks alone: amaxes, and results and gradients with tensor scaling, are of inputs without.

// The amax of y, as quantize::AmaxOfTensor has it: [count].
Status AmaxOfResult(const Executor& executor, const Function& function, const Inputs& inputs, float* amax);

// y in FP8. Without column sums.
Status ResultInTensor(const Executor& executor, const Function& function, const Inputs& inputs,
                      const quantize::Copies& copies, const quantize::TensorScaling& scaling);
Status ResultInBlocks(const Executor& executor, const Function& function, const Inputs& inputs,
                      const quantize::Copies& copies, const quantize::BlockScaling& scaling);

// One result of the backward pass in FP8, and its scales.
template <typename Scaling>
struct Output {
  quantize::Copies copies;
  Scaling scaling;
};

// The gradients of gate and up for that of y, dy [count, rows, cols], rounded to the dtype of the inputs; and y again,
// transposed, for the weight gradient of the layer that reads it. Formats may differ. `up` has no copies where the
// function is not gated, and `y` none where it is not asked for: it has no data in any case, and no column sums. The
// gradient of the weights, a sum over columns of dy times y without weights and not rounded, comes in parts of 128
// columns.
template <typename Scaling>
struct Outputs {
  Output<Scaling> gate;
  Output<Scaling> up;
  Output<Scaling> y;
  float* weight_sums;  // [count, cols / 128 rounded up, rows], or null where there are no weights
};

// The amaxes of both gradients, [count] each; that of up is null where the function is not gated.
Status AmaxOfGradients(const Executor& executor, const Function& function, const Inputs& inputs, const void* dy,
                       float* gate_amax, float* up_amax);

Status GradientsInTensors(const Executor& executor, const Function& function, const Inputs& inputs, const void* dy,
                          const Outputs<quantize::TensorScaling>& outputs);
Status GradientsInBlocks(const Executor& executor, const Function& function, const Inputs& inputs, const void* dy,
                         const Outputs<quantize::BlockScaling>& outputs);

}  // namespace te::activation
