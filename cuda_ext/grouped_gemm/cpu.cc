// Every group is a piece of a product, and gemm/cpu.cc shares out the tiles of all pieces to the threads: 2 m k n FLOPs
// for rows that are in groups, and none for the others.

#include "gemm/cpu.h"

#include <algorithm>
#include <vector>

#include "grouped_gemm/grouped_gemm.h"

namespace te::grouped_gemm {
namespace {

using gemm::Piece;
using gemm::Range;

// Rows that are zero.
Piece Zeros(const gemm::Problem& example, Range rows) {
  Piece piece{example, rows, {0, 0}};
  piece.problem.scaling = gemm::Scaling::kNone;  // scales may not be finite
  piece.problem.bias = nullptr;
  return piece;
}

Piece Group(const Problem& example, int64_t group, Range rows) {
  const gemm::Problem member = gemm::MemberOf(example.product, group);
  if (!example.grouped_sums) {
    Piece piece{member, rows, {0, member.k}};
    if (example.second) piece.more = {gemm::MemberOf(example.product, *example.second, group)};
    return piece;
  }
  Piece piece{member, {0, member.m}, rows};
  if (rows.count == 0) piece.problem.scaling = gemm::Scaling::kNone;
  return piece;
}

}  // namespace

Status Run(const Executor& executor, const Problem& problem) {
  std::vector<Piece> pieces;
  const int64_t rows = (problem.grouped_sums ? problem.product.k : problem.product.m) / problem.parts;
  for (int64_t i = 0; i < problem.examples.count; ++i) {
    const Problem example = ExampleOf(problem, i);
    const int32_t* bounds = example.bounds;
    for (int64_t part = 0; part < problem.parts; ++part, bounds += problem.groups + 1) {
      const int64_t offset = part * rows;
      int64_t begin = std::clamp<int64_t>(bounds[0], 0, rows);
      if (!problem.grouped_sums && begin > 0) pieces.push_back(Zeros(example.product, {offset, begin}));
      for (int64_t group = 0; group < problem.groups; ++group) {
        const int64_t end = std::clamp<int64_t>(bounds[group + 1], begin, rows);
        if (problem.grouped_sums || end > begin) {
          pieces.push_back(Group(example, group, {offset + begin, end - begin}));
        }
        begin = end;
      }
      if (!problem.grouped_sums && begin < rows)
        pieces.push_back(Zeros(example.product, {offset + begin, rows - begin}));
    }
  }
  return gemm::RunPieces(executor, pieces);
}

}  // namespace te::grouped_gemm
