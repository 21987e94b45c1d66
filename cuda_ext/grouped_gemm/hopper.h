// Grouped GEMMs on Hopper's tensor cores: gemm/hopper_kernel.cuh with the tiles of gemm/hopper_groups.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "common/status.h"
#include "gemm/gemm.h"
#include "gemm/hopper.h"

namespace te::gemm::hopper {

// One example of a grouped_gemm::Problem, whose batch counts the groups: FP8 operands, not both E5M2, or bfloat16 ones.
// Where sums are grouped, the latter have their summed values first. Arrays begin at multiples of 16 bytes, and so do
// their rows, but for bounds and bias; scales of blocks have m a multiple of 4. One for each mode, in files of their
// own: they compile side by side. Those of pairs add the product of a second pair of operands, of the same kinds, sizes
// and strides, and as aligned.
Status RunGroupedRowsBlock(cudaStream_t stream, const Problem& problem, const Groups& groups);
Status RunGroupedRowsPromoted(cudaStream_t stream, const Problem& problem, const Groups& groups);
Status RunGroupedRowsPlain(cudaStream_t stream, const Problem& problem, const Groups& groups);
Status RunGroupedPairsBlock(cudaStream_t stream, const Problem& problem, const OperandPair& second,
                            const Groups& groups);
Status RunGroupedPairsPlain(cudaStream_t stream, const Problem& problem, const OperandPair& second,
                            const Groups& groups);
Status RunGroupedSumsBlock(cudaStream_t stream, const Problem& problem, const Groups& groups);
Status RunGroupedSumsPromoted(cudaStream_t stream, const Problem& problem, const Groups& groups);
Status RunGroupedSumsPlain(cudaStream_t stream, const Problem& problem, const Groups& groups);

}  // namespace te::gemm::hopper
