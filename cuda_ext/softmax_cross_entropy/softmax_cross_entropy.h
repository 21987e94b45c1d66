// Softmax cross-entropy in two passes: row statistics, which give the loss, and the gradient from them.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/executor.h"
#include "common/status.h"

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
  const void* data;       // [rows, vocab] row-major, aligned as its type needs
  const int32_t* labels;  // [rows]
  int64_t rows;
  int64_t vocab;
  float softcap;  // 0 for none
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
  void* out;  // [rows, vocab] of the logits' type; may be the logits' own buffer
};

Status ComputeGradient(const Executor& executor, const Logits& logits, const Gradient& gradient);

}  // namespace te::softmax_cross_entropy
