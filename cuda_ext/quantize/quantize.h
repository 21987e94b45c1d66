// Quantization to FP8: amaxes, from which scales follow, and the scaled copies.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/executor.h"
#include "common/fp8.h"
#include "common/status.h"

namespace te::quantize {

inline constexpr int64_t kBlock = 128;  // values along one side of a block that shares a scale

// `count` matrices one after another, row-major, no dimension of size zero. Every array below holds its values for each
// matrix, one after another, too.
struct Matrices {
  DType dtype;
  const void* data;  // [count, rows, cols], aligned as its type needs
  int64_t count;
  int64_t rows;
  int64_t cols;
};

// An amax is NaN where any value is NaN, else infinite where any value is. NaN is always 0x7fc00000.
Status AmaxOfTensor(const Executor& executor, const Matrices& x, float* amax);

// Either result may be null.
Status AmaxOfRows(const Executor& executor, const Matrices& x, float* row_amax, float* col_amax);

// The results that all scalings share, and how values are encoded; common/fp8.h defines scales and codes.
struct Copies {
  Fp8 format;
  bool power_of_two_scales;
  uint8_t* data;        // [rows, cols], or null
  uint8_t* transposed;  // [cols, rows], or null; one of the two is there
  float* column_sums;   // [ceil(rows / 128), cols]: sums of x over 128 rows each, or null
};

// One scale, which follows from `amax`; larger values saturate. The scale_inv of an absent copy is null.
struct TensorScaling {
  const float* amax;  // of this tensor, or a prediction from earlier ones
  float* scale_inv;
  float* transposed_scale_inv;  // the same
  float* own_amax;              // of x itself, or null
};

// A scale for each row of data and for each row of transposed. Arrays of an absent copy are null.
struct RowScaling {
  const float* row_amax;  // [rows], of x
  const float* col_amax;  // [cols], of x
  float* row_scale_inv;   // [rows]
  float* col_scale_inv;   // [cols]
};

// A scale for each 128×128 block of x, or for each 1×128 block: 128 values of a row (data) or column (transposed).
// Blocks at the edges are smaller. The scale_inv of an absent copy is null.
struct BlockScaling {
  bool data_128x128;
  bool transposed_128x128;
  float* scale_inv;             // 128×128: [rows / 128, cols / 128], 1×128: [cols / 128, rows]; rounded up
  float* transposed_scale_inv;  // 128×128: [cols / 128, rows / 128], 1×128: [rows / 128, cols]; rounded up
};

// Matrices made of rows of tables: row r is row index[r] of the table of its matrix, and zeros where the table has
// none.
struct Gather {
  const int32_t* index;  // [count, rows of the matrix]
  int64_t rows;          // of a table
  const int32_t* order;  // [count, rows / 128 rounded up]: in which order to take them, each once; or null: as they lie
};

// The results of kernels that compute y row by row: y in FP8, not transposed. With tensor scaling `reference_amax` says
// from which amax the scale follows; otherwise it is null and every 1×128 values of a row share a scale.
struct RowOutputs {
  Fp8 format;
  bool power_of_two_scales;
  uint8_t* data;                // [count, rows, cols], or null: no more than `amax`
  const float* reference_amax;  // [count]
  float* scale_inv;             // tensor: [count]; blocks: [count, cols / 128 rounded up, rows]
  float* amax;                  // of y, raised from what it is: [count], or null
};

Status QuantizeTensor(const Executor& executor, const Matrices& x, const Copies& copies, const TensorScaling& scaling);
Status QuantizeRows(const Executor& executor, const Matrices& x, const Copies& copies, const RowScaling& scaling);
Status QuantizeBlocks(const Executor& executor, const Matrices& x, const Copies& copies, const BlockScaling& scaling);

// The same of x with gathered rows; x.data are the tables, [count, gather.rows, cols].
Status QuantizeBlocksOfRows(const Executor& executor, const Matrices& x, const Gather& gather, const Copies& copies,
                            const BlockScaling& scaling);

}  // namespace te::quantize
