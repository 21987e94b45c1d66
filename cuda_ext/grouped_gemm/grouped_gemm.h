// Matrix products of groups of rows, for experts that have different numbers of tokens. A group of rows is a range
// [begin, end) whose bounds are data: sizes change under one compiled program.
//
//   grouped rows        D[r, n] = Σ_k A[r, k] B_g[n, k] + bias_g[n]                    for rows r of group g
//   two pairs           D[r, n] = Σ_k A[r, k] B_g[n, k] + Σ_k A'[r, k] B'_g[n, k] + bias_g[n]
//   grouped sums        D_g[m, n] = accumulator_g[m, n] + Σ_r A[m, r] B[n, r]         over rows r of group g
//
// Rows of D in no group are zero. An empty group has no rows of D, or a D_g of zeros or of the accumulator. Rows of A
// and B in no group are never read, whatever they hold. No more is multiplied than there are rows in groups.
#pragma once

#include <cstdint>
#include <optional>

#include "gemm/gemm.h"

namespace te::grouped_gemm {

struct Problem {
  // One example, whose batch holds the strides from one group to the next. Grouped rows: m is all rows of A, and a is
  // [m, k]; b, its scales and the bias have one member for each group. Grouped sums: k is all rows, and d and the
  // accumulator have one member for each group. Scales are those of `gemm::Scaling` with these m, n and k.
  gemm::Problem product;
  gemm::StridedBatch examples;
  // Operands whose product is added, of the same kinds, sizes and strides. Only for grouped rows that are plain or have
  // scales of blocks.
  std::optional<gemm::OperandPair> second;
  bool grouped_sums;
  int64_t groups;
  // Equal parts of the rows, each with groups of its own that share the members of b; 1 for grouped sums.
  int64_t parts;
  // [examples, parts, groups + 1]: row, within its part, where each group begins, and where the last one ends. Bounds
  // outside [0, rows of the part] or below those before are raised or lowered to them.
  const int32_t* bounds;
};

// The problem of one example.
inline Problem ExampleOf(const Problem& problem, int64_t i) {
  Problem example = problem;
  example.product.batch = problem.examples;
  if (example.second) example.second = gemm::MemberOf(example.product, *example.second, i);
  example.product = gemm::MemberOf(example.product, i);
  example.product.batch = problem.product.batch;
  example.examples = {};
  example.bounds += i * problem.parts * (problem.groups + 1);
  return example;
}

Status Run(const Executor& executor, const Problem& problem);

}  // namespace te::grouped_gemm
