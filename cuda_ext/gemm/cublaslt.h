// Products of plain operands, and of FP8 operands with one scale each or one for each row, by cuBLASLt, or for FP8 by
// the package's kernel where timing finds that one faster.
//
// How a product is computed is found once for each device and kind of problem, and kept: Run then only sets pointers.
#pragma once

#include <cuda_runtime_api.h>

#include "common/status.h"
#include "gemm/gemm.h"

namespace te::gemm::cublaslt {

// Without an algorithm for the product it fails, or says so in *has_algorithm and does nothing.
Status Run(cudaStream_t stream, const Problem& problem, bool* has_algorithm = nullptr);

// Finds the plan that Run will use, and times candidates where the problem asks for it, on a stream of its own with
// memory of its own. Does nothing where the plan is known, or while the stream is being captured.
Status Prepare(cudaStream_t stream, const Problem& problem, bool* has_algorithm = nullptr);

}  // namespace te::gemm::cublaslt
