// Row statistics of softmax cross-entropy: everything that the loss and its gradient need, from one read of the logits.
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

// logits [rows, vocab] row-major, any alignment that its type allows; labels and every statistic [rows].
Status Compute(const Executor& executor, DType dtype, const void* logits, const int32_t* labels, int64_t rows,
               int64_t vocab, float softcap, bool with_total, Statistics out);

}  // namespace te::softmax_cross_entropy
