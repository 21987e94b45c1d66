// CUDA's own errors as Status.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "common/status.h"

namespace te {

inline Status Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status::Ok();
  static_cast<void>(cudaGetLastError());  // reported here: the thread's next launch would find it again
  std::string message = std::string(what) + ": " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    message +=
        "; te_jax's CUDA kernels are for GPUs of compute capability 9.0 (H100, H200), and the program that calls them "
        "was made for one: export it for this GPU with implementation='xla' or 'reference'";
  }
  return Status::Failed(message);
}

// Counts those of the current device.
inline Status CountMultiprocessors(int* count) {
  int device = 0;
  if (Status s = Check(cudaGetDevice(&device), "cudaGetDevice"); !s.ok()) return s;
  return Check(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
}

// The device is current while this lives.
class ScopedDevice {
 public:
  explicit ScopedDevice(int ordinal) {
    if (cudaGetDevice(&before_) == cudaSuccess && before_ != ordinal) cudaSetDevice(ordinal);
  }
  ~ScopedDevice() {
    if (before_ >= 0) cudaSetDevice(before_);
  }
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  int before_ = -1;
};

}  // namespace te
