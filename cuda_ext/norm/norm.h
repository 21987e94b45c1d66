// RMS and layer normalization of rows, with results in FP8, and their gradients. Results in the dtype of x without FP8
// are XLA's: its fused loops are at the bandwidth of memory forward, and at half of it backward.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/executor.h"
#include "common/status.h"
#include "quantize/quantize.h"

namespace te::norm {

// y = (s - mean) · rstd · gamma + beta, with s = x or, with a residual, x + residual rounded to the dtype; mean 0
// unless centered, rstd = 1 / sqrt(mean of (s - mean)² + epsilon), NaN where that mean overflows. Computed in float32,
// y rounded to the dtype.
//
// `count` matrices one after another, row-major, no dimension of size zero.
struct Inputs {
  DType dtype;
  const void* x;         // [count, rows, cols]
  const void* residual;  // the same, or null
  const float* gamma;    // [count, cols]
  const float* beta;     // [count, cols], or null
  float epsilon;
  bool centered;
  int64_t count;
  int64_t rows;
  int64_t cols;
};

// The mean and the reciprocal standard deviation of each row, [count, rows]; `mean` is null unless centered.
struct Statistics {
  float* mean;
  float* rstd;
};

// The results of one pass over x; every pointer may be null. The amax of `rows` is set to zero first.
struct Outputs {
  void* sum;              // s, [count, rows, cols]
  Statistics statistics;  // rstd is there
  quantize::RowOutputs rows;
};

Status Normalize(const Executor& executor, const Inputs& inputs, const Outputs& outputs);

// y in FP8 from statistics that are known, of an x that has no residual (any more). Without column sums. In blocks
// there is a transposed copy, with scales of 1×128 values.
Status NormalizedInTensor(const Executor& executor, const Inputs& inputs, const Statistics& statistics,
                          const quantize::Copies& copies, const quantize::TensorScaling& scaling);
Status NormalizedInBlocks(const Executor& executor, const Inputs& inputs, const Statistics& statistics,
                          const quantize::Copies& copies, const quantize::BlockScaling& scaling);

// The gradients for dy, that of y: of x, plus `dsum` where it is not null; and of gamma and beta, as `partials` sums of
// some of the rows each, which the caller adds up.
struct Gradients {
  void* dx;          // [count, rows, cols], in the dtype of x
  int64_t partials;  // at least 1
  float* dgamma;     // [count, partials, cols]
  float* dbeta;      // the same, or null
};

Status Backward(const Executor& executor, const Inputs& inputs, const Statistics& statistics, const void* dy,
                const void* dsum, const Gradients& gradients);

}  // namespace te::norm
