// FP8 products on Hopper's tensor cores, with the scales of every recipe: the kernel behind row and block scaling.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace te::gemm::hopper {

enum class Scaling { kTensor, kRow, kBlock };

// d[m, n] = Σ_k a[m, k] b[n, k] · scales, + bias[n], + d[m, n] where accumulate. All matrices are row-major, so the
// summed dimension is contiguous in both operands, as FP8 tensor cores need it. Pointers are aligned to 16 bytes, k is
// a multiple of 16, n of 8, and with kBlock m of 4.
struct Problem {
  int64_t m, n, k;
  const void* a;
  bool a_is_e5m2;
  const void* b;
  bool b_is_e5m2;  // not both
  Scaling scaling;
  const float* a_scale_inv;  // kTensor [1], kRow [m], kBlock [ceil(k / 128), m]
  const float* b_scale_inv;  // kTensor [1], kRow [n], kBlock [ceil(n / 128), ceil(k / 128)]
  const void* bias;          // [n] of d's type, or null
  void* d;
  DType d_type;
  bool accumulate;
  bool fast_accumulation;  // kTensor and kRow: sums stay in the tensor cores; otherwise float32 takes over every 128
};

Status Run(cudaStream_t stream, const Problem& problem);

}  // namespace te::gemm::hopper
