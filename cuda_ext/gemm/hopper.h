// FP8 products on Hopper's tensor cores, with the scales of every recipe: the kernel behind row and block scaling.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "common/status.h"
#include "gemm/gemm.h"

namespace te::gemm::hopper {

// Rows in groups, whose bounds are on the device.
struct Groups {
  const int32_t* bounds;  // [parts of all rows, count + 1], as of grouped_gemm::Problem
  int count;
  int rows_of_part;
  int first_part, parts;  // those of one launch
  int b_scales_before;    // values between the multiple of 16 bytes that TMA is told and b's scales of blocks
};

// Products of FP8 operands, not both E5M2, without gelu. Arrays begin at multiples of 16 bytes, and so do those of
// every product of a batch but for scales, of which only a's must, and only with blocks. k and n are multiples of 16,
// and with blocks m of 4 where it has not few rows (hopper_tiles.h).
Status Run(cudaStream_t stream, const Problem& problem);

// See te::gemm::RunSum: the products of one or two pairs more. One for each number, in files of their own: they compile
// side by side.
Status RunSumOfTwo(cudaStream_t stream, const Problem& problem, std::span<const OperandPair> more);
Status RunSumOfThree(cudaStream_t stream, const Problem& problem, std::span<const OperandPair> more);

// Values between the multiple of 16 bytes that TMA is told and b's scales.
inline int ScalesBefore(const Operand& b) { return static_cast<int>(reinterpret_cast<uintptr_t>(b.scales) % 16 / 4); }

}  // namespace te::gemm::hopper
