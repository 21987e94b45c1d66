// Which of a plan's algorithms is the fastest on this device.
#pragma once

#include <cublasLt.h>

#include "gemm/cublaslt_plan.h"

namespace te::gemm::cublaslt {

// Times the algorithms of a plan. Returns the first where there is no memory for it, and never fails: a product can do
// without. Works on a stream and on memory of its own, with the current device.
size_t FastestAlgorithm(cublasLtHandle_t handle, Plan& plan);

}  // namespace te::gemm::cublaslt
