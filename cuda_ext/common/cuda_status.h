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
