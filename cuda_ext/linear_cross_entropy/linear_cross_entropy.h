// What labels contribute to the gradients of an output head and its cross-entropy, beside products in FP8.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/executor.h"
#include "common/status.h"

namespace te::linear_cross_entropy {

// Subtracts, for each token t whose column c lies in [0, vocab):
//   dx[t]         factor[t] · kernel of column c, from dx_without[t], rounded to the type of x
//   dkernel of c  factor[t] · x[t]
//   dbias[c]      factor[t]
// Tokens come in the order of their columns, so that all of one column are added up before, always in the same order.
struct Labels {
  DType dtype;              // of x, kernel and dx
  const int32_t* columns;   // [tokens], ascending
  const int32_t* order;     // [tokens]: which token each of them belongs to
  const float* factor;      // [tokens], in the order of x
  const void* x;            // [tokens, width]
  const void* kernel;       // [width, vocab] with vocab_last, else [vocab, width]
  const float* dx_without;  // [tokens, width], or null
  void* dx;                 // [tokens, width]; null without dx_without
  float* dkernel;           // shaped as kernel, updated in place, or null
  float* dbias;             // [vocab], updated in place, or null
  int64_t tokens;
  int64_t width;
  int64_t vocab;
  bool vocab_last;

  // What order says of a place; outside of [0, tokens) it names no token, and nothing is done there.
  constexpr int64_t TokenAt(int64_t place) const {
    const int64_t token = order[place];
    return 0 <= token && token < tokens ? token : -1;
  }
  // Index of a value in kernel and dkernel.
  constexpr int64_t At(int64_t i, int64_t column) const { return vocab_last ? i * vocab + column : column * width + i; }
};

Status SubtractLabels(const Executor& executor, const Labels& labels);

}  // namespace te::linear_cross_entropy
