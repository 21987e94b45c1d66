// Matrix products with both operands quantized or both plain, and what follows them in the same pass:
//
//   D[m, n] = Σ_k A[m, k] B[n, k] + bias[n],  gelu of that,  or  accumulator[m, n] + Σ_k A[m, k] B[n, k]
//
// with gelu(x) = 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))). D is row-major. FP8 operands stand for their values times
// their scales. Sums are float32.
#pragma once

#include <cstdint>
#include <span>
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

// How a GPU multiplies; a CPU knows one way.
//   kAuto      the fastest candidate of cuBLASLt's and the package's kernel, timed once for each kind of product
//   kCublasLt  cuBLASLt's first suggestion; the package's kernel for FP8 products that cuBLASLt has no form for
//   kTeJax     the package's kernel, which multiplies FP8 and has no gelu; the only algorithm for kBlock
enum class Algorithm { kAuto, kCublasLt, kTeJax };

struct Operand {
  const void* data;     // [outer, k], or [k, outer] where summed_first, which only plain operands may be
  const float* scales;  // null for kNone
  Type type;
  bool summed_first;
};

// Operands whose product over k values is added to that of a problem's own, of the same types, m and n.
struct OperandPair {
  Operand a;
  Operand b;
  int64_t k;
};

// Strides are in values, from one product's to the next one's, and 0 where all have the same. Accumulator and
// preactivation have that of d.
struct StridedBatch {
  int64_t count = 1, a_stride = 0, b_stride = 0, a_scales_stride = 0, b_scales_stride = 0, bias_stride = 0,
          d_stride = 0;
};

struct Problem {
  int64_t m, n, k;
  Operand a;
  Operand b;
  Scaling scaling;
  Algorithm algorithm;
  bool fast_accumulation;   // sums of FP8 products may stay in the tensor cores
  bool gelu;                // only plain or with kTensor, and with D of 16 bits
  Type d_type;              // of D and of the arrays that follow; not FP8
  const void* bias;         // [n], or null
  const void* accumulator;  // [m, n], perhaps D itself, or null; comes with no bias and no gelu
  void* preactivation;      // [m, n], the values that gelu is applied to, or null
  void* d;                  // [m, n]
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

// One product of a batch.
inline Problem MemberOf(const Problem& problem, int64_t i) {
  const StridedBatch& batch = problem.batch;
  const int64_t size = SizeOf(problem.d_type);
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
  advance(member.bias, batch.bias_stride * size);
  advance(member.accumulator, batch.d_stride * size);
  advance(member.preactivation, batch.d_stride * size);
  advance(member.d, batch.d_stride * size);
  return member;
}

// The same of operands that lie as the problem's own do.
inline OperandPair MemberOf(const Problem& problem, const OperandPair& pair, int64_t i) {
  Problem of_pair = problem;
  of_pair.a = pair.a, of_pair.b = pair.b;
  const Problem member = MemberOf(of_pair, i);
  return {member.a, member.b, pair.k};
}

Status Run(const Executor& executor, const Problem& problem);

// A product with kBlock and the products of one or two more pairs, all added up before D is rounded. No batch, and
// nothing else is added.
Status RunSum(const Executor& executor, const Problem& problem, std::span<const OperandPair> more);

#ifdef TE_JAX_CUDA
// Finds what Run will need, at leisure: never on the executor's stream, and without touching the problem's arrays.
Status Prepare(const Executor& executor, const Problem& problem);
#else
// The sgemm of a Fortran BLAS to multiply with, and its type as scipy's Cython declares it. Run refuses others.
void UseSgemm(void* function, std::string signature);
#endif

}  // namespace te::gemm
