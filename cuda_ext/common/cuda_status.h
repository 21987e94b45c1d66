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
        "; te_jax's CUDA kernels are for GPUs of compute capability 9.0 and later, those of matrix products for 9.0 "
        "alone (H100, H200), and the program that calls them was made for another GPU: export it for this one with "
        "implementation='xla' or 'reference'";
  }
  return Status::Failed(message);
}

// An attribute of the current device.
inline Status GetAttribute(cudaDeviceAttr attribute, int* value) {
  int device = 0;
  if (Status s = Check(cudaGetDevice(&device), "cudaGetDevice"); !s.ok()) return s;
  return Check(cudaDeviceGetAttribute(value, attribute, device), "cudaDeviceGetAttribute");
}

inline Status CountMultiprocessors(int* count) { return GetAttribute(cudaDevAttrMultiProcessorCount, count); }

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
