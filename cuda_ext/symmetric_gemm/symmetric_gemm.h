// Products whose results are symmetric, for each matrix of a stack:
//
//   D[m, m] = alpha · Σ_k A[m, k] B[m, k] + beta · C[m, m] + diagonal · I
//
// as A Aᵀ is, and the product of two symmetric matrices that commute. The lower triangle is computed, from that of C,
// and the upper one is its mirror, bit for bit. Sums are float32.
#pragma once

#include <cstdint>

#include "common/executor.h"
#include "common/status.h"
#include "gemm/gemm.h"

namespace te::symmetric_gemm {

struct Problem {
  gemm::Type type;  // of all arrays: float16 or bfloat16
  int64_t count, m, k;
  const void* a;      // [count, m, k], or [count, k, m] where summed_first
  const void* b;      // like a
  const void* c;      // [count, m, m], or null
  bool summed_first;  // a and b
  float alpha, beta, diagonal;
  void* d;  // [count, m, m]
};

// On a GPU m is a multiple of 128 and k of 8, and arrays begin at multiples of 16 bytes.
inline constexpr int64_t kTile = 128;

Status Run(const Executor& executor, const Problem& problem);

}  // namespace te::symmetric_gemm
