// The parts of the CPU GEMM that other CPU products build on.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gemm/gemm.h"

namespace te::gemm {

struct Range {
  int64_t begin;
  int64_t count;
};

// A part of a product: some rows of D, of the sums over some values of k. Pointers and sizes of the problem, which has
// no batch, are those of the whole. Where nothing is summed, D gets what follows a product of zeros. The products
// of more pairs of operands, which are like the first and plain or with scales of blocks, are added before that.
struct Piece {
  Problem problem;
  Range rows;
  Range summed;
  std::vector<OperandPair> more = {};
};

// Computes all pieces. The threads share out the tiles of all of them, so that small ones cost no waiting.
Status RunPieces(const Executor& executor, std::span<const Piece> pieces);

}  // namespace te::gemm
