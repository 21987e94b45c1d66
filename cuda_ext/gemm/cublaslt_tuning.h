// Which algorithm of which plan is the fastest on this device.
#pragma once

#include <cublasLt.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "gemm/cublaslt_plan.h"

namespace te::gemm::cublaslt {

struct Choice {
  size_t plan = 0;
  size_t algorithm = 0;
};

// Times the algorithms of plans for one problem. Returns the first of the first where there is no memory for it, and
// reports that once; never fails: a product can do without. Works on a stream and on memory of its own, with the
// current device.
Choice FastestAlgorithm(cublasLtHandle_t handle, const std::vector<std::unique_ptr<Plan>>& plans);

}  // namespace te::gemm::cublaslt
