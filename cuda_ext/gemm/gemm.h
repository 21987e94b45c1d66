// Matrix products with both operands quantized or both plain, and what follows them in the same pass:
//
//   D[m, n] = epilogue(Σ_k A[m, k] B[n, k] + bias[n])  or  accumulator[m, n] + Σ_k A[m, k] B[n, k]
//
// D is row-major. FP8 operands stand for their values times their scales. Sums are float32.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "common/dtype.h"
#include "common/executor.h"
#include "common/status.h"

namespace te::gemm {

enum class Type { kFloat32, kBFloat16, kFloat16, kE4M3, kE5M2 };

constexpr bool IsFp8(Type type) { return type == Type::kE4M3 || type == Type::kE5M2; }
constexpr int64_t SizeOf(Type type) { return type == Type::kFloat32 ? 4 : IsFp8(type) ? 1 : 2; }

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

// Strides are in values, from one product's to the next one's, and 0 where all have the same. Accumulator, aux_in and
// aux_out have that of d; scalars follow each other.
struct StridedBatch {
  int64_t count = 1, a_stride = 0, b_stride = 0, a_scales_stride = 0, b_scales_stride = 0, bias_stride = 0,
          d_stride = 0;
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
  StridedBatch batch;
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
  const int64_t size = SizeOf(problem.d_type), side_size = SizeOf(SideType(problem.d_type));
  Problem member = problem;
  member.batch = {};
  const auto advance = [i]<typename T>(T*& pointer, int64_t bytes) {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    if (pointer != nullptr) pointer = reinterpret_cast<T*>(reinterpret_cast<Byte*>(pointer) + i * bytes);
  };
  advance(member.a.data, batch.a_stride * SizeOf(problem.a.type));
  advance(member.b.data, batch.b_stride * SizeOf(problem.b.type));
  advance(member.a.scales, batch.a_scales_stride * 4);
  advance(member.b.scales, batch.b_scales_stride * 4);
  advance(member.bias, batch.bias_stride * side_size);
  advance(member.accumulator, batch.d_stride * size);
  advance(member.aux_in, batch.d_stride * side_size);
  advance(member.aux_out, batch.d_stride * side_size);
  advance(member.d, batch.d_stride * size);
  advance(member.amax_in, 4);
  advance(member.amax_out, 4);
  advance(member.d_scale_inv, 4);
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
