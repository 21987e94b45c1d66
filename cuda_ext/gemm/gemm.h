// Matrix products with both operands quantized or both plain, and what follows them in the same pass:
//
//   D[m, n] = epilogue(Σ_k A[m, k] B[n, k] + bias[n])  or  accumulator[m, n] + Σ_k A[m, k] B[n, k]
//
// D is row-major. FP8 operands stand for their values times their scales. Sums are float32.
#pragma once

#include <cstdint>
#include <string>

#include "common/dtype.h"
#include "common/executor.h"
#include "common/status.h"

namespace te::gemm {

enum class Type { kFloat32, kBFloat16, kFloat16, kE4M3, kE5M2 };

constexpr bool IsFp8(Type type) { return type == Type::kE4M3 || type == Type::kE5M2; }
constexpr int64_t SizeOf(Type type) { return type == Type::kFloat32 ? 4 : IsFp8(type) ? 1 : 2; }
constexpr DType DTypeOf(Type type) {
  return type == Type::kFloat32 ? DType::kFloat32 : type == Type::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
}

// Values that share a scale; scales are those by which FP8 values are multiplied.
//   kNone    plain operands without scales
//   kTensor  a [1], b [1]
//   kRow     a [m], b [n]
//   kBlock   a [ceil(k / 128), m], b [ceil(n / 128), ceil(k / 128)]
enum class Scaling { kNone, kTensor, kRow, kBlock };
inline constexpr int64_t kBlockSize = 128;

// With gelu(x) = 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))):
//   kGelu   D = gelu(x), and aux_out = x where it is not null
//   kDgelu  D = x · gelu'(aux_in)
enum class Epilogue { kNone, kGelu, kDgelu };

struct Operand {
  const void* data;     // [outer, k], or [k, outer] where summed_first, which only plain operands may be
  const float* scales;  // null for kNone
  Type type;
  bool summed_first;
};

// Products with the same b and bias. Strides are in values, from one product's to the next one's; the accumulator has
// that of d.
struct StridedBatch {
  int64_t count = 1, a_stride = 0, a_scales_stride = 0, d_stride = 0;
};

struct Problem {
  int64_t m, n, k;
  Operand a;
  Operand b;
  Scaling scaling;
  Epilogue epilogue;
  const void* bias;         // [n] of SideType(d_type), or null
  const void* accumulator;  // [m, n] of D's type, perhaps D itself, or null; comes with no bias and no epilogue
  const void* aux_in;       // [m, n] of SideType(d_type), for kDgelu
  void* aux_out;            // [m, n] of SideType(d_type), for kGelu, or null
  void* d;                  // [m, n]
  Type d_type;
  // For D in FP8, with kTensor: its scale follows from amax_in; amax_out is the largest magnitude before scaling.
  const float* amax_in;
  float* amax_out;
  float* d_scale_inv;
  bool power_of_two_scale;
  bool fast_accumulation;  // sums of FP8 products may stay in the tensor cores
  bool autotune;           // time candidates rather than take the library's first suggestion
  bool own_kernel;         // kTensor and kRow by the kernel of kBlock, untimed
  void* workspace;
  int64_t workspace_bytes;
  StridedBatch batch;  // of several with no epilogue, and D not in FP8
};

// Scales of an operand with so many outer values; square ones are those of b.
constexpr int64_t ScaleCount(const Problem& problem, int64_t outer, bool square) {
  const auto blocks = [](int64_t size) { return (size + kBlockSize - 1) / kBlockSize; };
  switch (problem.scaling) {
    case Scaling::kNone:
      return 0;
    case Scaling::kTensor:
      return 1;
    case Scaling::kRow:
      return outer;
    case Scaling::kBlock:
      return blocks(problem.k) * (square ? blocks(outer) : outer);
  }
  return 0;
}

// Type of bias and of what gelu saves: D's own, and bfloat16 beside D in FP8.
constexpr Type SideType(Type d_type) { return IsFp8(d_type) ? Type::kBFloat16 : d_type; }

// One product of a batch.
inline Problem MemberOf(const Problem& problem, int64_t i) {
  const StridedBatch& batch = problem.batch;
  const int64_t d_bytes = i * batch.d_stride * SizeOf(problem.d_type);
  Problem member = problem;
  member.batch = {};
  member.a.data = static_cast<const char*>(problem.a.data) + i * batch.a_stride * SizeOf(problem.a.type);
  if (member.a.scales != nullptr) member.a.scales += i * batch.a_scales_stride;
  member.d = static_cast<char*>(problem.d) + d_bytes;
  if (member.accumulator != nullptr) member.accumulator = static_cast<const char*>(problem.accumulator) + d_bytes;
  return member;
}

Status Run(const Executor& executor, const Problem& problem);

#ifdef TE_JAX_CUDA
// Finds what Run will need, at leisure: never on the executor's stream, and without touching the problem's arrays.
Status Prepare(const Executor& executor, const Problem& problem);
#else
// The sgemm of a Fortran BLAS to multiply with, and its type as scipy's Cython declares it. Run refuses others.
void UseSgemm(void* function, std::string signature);
#endif

}  // namespace te::gemm
