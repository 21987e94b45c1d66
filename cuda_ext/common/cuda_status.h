// CUDA's own errors as Status.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "common/status.h"

namespace te {

inline Status Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status::Ok();
  return Status::Failed(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace te
