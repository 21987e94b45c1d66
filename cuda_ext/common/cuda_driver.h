// Functions of the driver, which this library does not link.
#pragma once

#include <cuda_runtime_api.h>

namespace te {

// Null where the driver lacks it.
template <typename Function>
Function FindInDriver(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function) : nullptr;
}

}  // namespace te
