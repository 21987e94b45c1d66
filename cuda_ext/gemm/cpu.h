// The parts of the CPU GEMM that other CPU products build on.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "gemm/gemm.h"

namespace te::gemm {

struct Range {
  int64_t begin;
  int64_t count;
};

// A part of a product: some rows of D, of the sums over some values of k. Pointers and sizes of the problem, which has
// no batch, are those of the whole. Where nothing is summed, D gets what follows a product of zeros. The product of a
// second pair of operands, which are like the first and plain or with scales of blocks, is added before that.
struct Piece {
  Problem problem;
  Range rows;
  Range summed;
  std::optional<OperandPair> second = std::nullopt;
};

// Computes all pieces. The threads share out the tiles of all of them, so that small ones cost no waiting.
Status RunPieces(const Executor& executor, std::span<const Piece> pieces);

}  // namespace te::gemm
