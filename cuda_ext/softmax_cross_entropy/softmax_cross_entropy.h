// Softmax cross-entropy: row statistics, which give the loss, and the gradient from them; in two passes, in one, or
// with the gradient in FP8.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/executor.h"
#include "common/status.h"
#include "quantize/quantize.h"

namespace te::softmax_cross_entropy {

// A label of kIgnored means that the row is not read and all its statistics are zero.
inline constexpr int32_t kIgnored = -1;

// Per row of z = logits, or z = softcap · tanh(logits / softcap) where softcap > 0:
//   lse    log Σ_v exp(z_v); NaN where the row holds a NaN or +inf, -inf where every logit is -inf
//   target z[label], or 0 where the label lies outside [0, vocab)
//   total  Σ_v z_v where with_total, otherwise 0
struct Statistics {
  float* lse;
  float* target;
  float* total;
};

struct Logits {
  DType dtype;
  const void* data;       // [rows, stride] row-major, aligned as its type needs
  const int32_t* labels;  // [rows]
  int64_t rows;
  int64_t vocab;   // the first columns of a row
  int64_t stride;  // of rows; what lies between is not read, and has no gradient
  float softcap;   // 0 for none
};

Status ComputeStatistics(const Executor& executor, const Logits& logits, bool with_total, Statistics out);

// gradient[r, v] = weight[r] · ((1 + 2 z_loss lse[r]) exp(z_v - lse[r]) - uniform - [v = label] (1 - label_smoothing))
//                  · dz_v/dlogits_v, and 0 in rows of weight 0, which are not read.
struct Gradient {
  const float* lse;     // [rows]
  const float* weight;  // [rows]: the cotangent of each row's loss
  float label_smoothing;
  float uniform;  // label_smoothing / size of the whole vocabulary
  float z_loss;
  void* out;  // [rows, stride] of the logits' type; may be the logits' own buffer
};

Status ComputeGradient(const Executor& executor, const Logits& logits, const Gradient& gradient);

// Both: logits are read once where a row fits into the shared memory of a cluster. gradient.lse is statistics.lse.
Status ComputeBoth(const Executor& executor, const Logits& logits, bool with_total, Statistics statistics,
                   const Gradient& gradient);

// The gradient [rows, stride] in FP8 with scales of blocks. gradient.out is not used.
Status QuantizeGradient(const Executor& executor, const Logits& logits, const Gradient& gradient,
                        const quantize::Copies& copies, const quantize::BlockScaling& scaling);

}  // namespace te::softmax_cross_entropy
