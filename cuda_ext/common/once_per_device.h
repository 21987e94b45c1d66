// Runs a function once on each GPU, such as setting attributes of a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace te {

class OncePerDevice {
 public:
  // Runs prepare() unless it has succeeded on the current device before; at first perhaps in several threads at once.
  template <typename Prepare>
  cudaError_t Run(const Prepare& prepare) {
    int ordinal = 0;
    if (const cudaError_t error = cudaGetDevice(&ordinal); error != cudaSuccess) return error;
    const uint64_t device = ordinal < 64 ? uint64_t{1} << ordinal : 0;
    if (done_.load(std::memory_order_acquire) & device) return cudaSuccess;
    const cudaError_t error = prepare();
    if (error == cudaSuccess) done_.fetch_or(device, std::memory_order_release);
    return error;
  }

 private:
  std::atomic<uint64_t> done_{0};
};

}  // namespace te
