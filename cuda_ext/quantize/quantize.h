// Quantization to FP8: the largest magnitudes that scales follow from, and the scaled copies.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/executor.h"
#include "common/fp8.h"
#include "common/status.h"

namespace te::quantize {

inline constexpr int64_t kBlock = 128;  // values along one side of a block that shares a scale

// Tensors one after another, `count` of them, each with its dimensions grouped into two: row-major, no dimension of
// size zero. Every array below has what it says for each of them, one after another, too.
struct Matrices {
  DType dtype;
  const void* data;  // [count, rows, cols], aligned as its type needs
  int64_t count;
  int64_t rows;
  int64_t cols;
};

// Largest magnitudes are NaN where any value is NaN, else infinite where any value is. NaN is always 0x7fc00000.
Status AmaxOfTensor(const Executor& executor, const Matrices& x, float* amax);

// Either result may be null.
Status AmaxOfRows(const Executor& executor, const Matrices& x, float* row_amax, float* col_amax);

// What quantization writes, and how. common/fp8.h says what a scale and a code are.
struct Copies {
  Fp8 format;
  bool power_of_two_scales;
  uint8_t* data;        // [rows, cols], or null
  uint8_t* transposed;  // [cols, rows], or null; one of the two is there
  float* column_sums;   // [ceil(rows / 128), cols]: sums of x over 128 rows each, or null
};

// One scale. It follows from `amax`; larger values saturate. What belongs to an absent copy is null.
struct TensorScaling {
  const float* amax;  // of the whole tensor now, or of earlier ones
  float* scale_inv;
  float* transposed_scale_inv;  // the same
  float* own_amax;              // of x itself, or null
};

// A scale for each row of data and for each row of transposed. What belongs to an absent copy is null.
struct RowScaling {
  const float* row_amax;  // [rows], of x
  const float* col_amax;  // [cols], of x
  float* row_scale_inv;   // [rows]
  float* col_scale_inv;   // [cols]
};

// A scale for each block of x itself: squares of 128 × 128, or 128 values of one row (data) or column (transposed).
// Blocks at the edges are smaller. What belongs to an absent copy is null.
struct BlockScaling {
  bool data_square;
  bool transposed_square;
  float* scale_inv;             // [rows / 128, cols / 128] where square, else [cols / 128, rows]; rounded up
  float* transposed_scale_inv;  // [cols / 128, rows / 128] where square, else [rows / 128, cols]; rounded up
};

Status QuantizeTensor(const Executor& executor, const Matrices& x, const Copies& copies, const TensorScaling& scaling);
Status QuantizeRows(const Executor& executor, const Matrices& x, const Copies& copies, const RowScaling& scaling);
Status QuantizeBlocks(const Executor& executor, const Matrices& x, const Copies& copies, const BlockScaling& scaling);

}  // namespace te::quantize
