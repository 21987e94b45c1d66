// CUDA's own errors as Status.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <string>
#include <utility>
#include <variant>

#include "common/per_device.h"
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

// The current device's value, as `PerDevice::Of` makes it.
template <typename T, typename Make>
Status OfCurrentDevice(PerDevice<T>& values, const Make& make, T** value) {
  int device = 0;
  if (Status s = Check(cudaGetDevice(&device), "cudaGetDevice"); !s.ok()) return s;
  return values.Of(device, make, value);
}

using FunctionAttributes = std::initializer_list<std::pair<cudaFuncAttribute, int>>;

inline Status SetAttributesOnce(PerDevice<std::monostate>& set, const void* kernel, FunctionAttributes attributes) {
  const auto set_all = [&](std::monostate) {
    for (const auto& [attribute, value] : attributes) {
      TE_JAX_TRY(Check(cudaFuncSetAttribute(kernel, attribute, value), "cudaFuncSetAttribute"));
    }
    return Status::Ok();
  };
  std::monostate* unused = nullptr;
  return OfCurrentDevice(set, set_all, &unused);
}

// Sets attributes of a kernel before its first launch on the current device.
template <auto kKernel>
Status SetAttributesOnce(FunctionAttributes attributes) {
  static PerDevice<std::monostate> set;
  return SetAttributesOnce(set, reinterpret_cast<const void*>(kKernel), attributes);
}

// An attribute of the current device.
inline Status GetAttribute(cudaDeviceAttr attribute, int* value) {
  int device = 0;
  if (Status s = Check(cudaGetDevice(&device), "cudaGetDevice"); !s.ok()) return s;
  return Check(cudaDeviceGetAttribute(value, attribute, device), "cudaDeviceGetAttribute");
}

inline Status CountMultiprocessors(int* count) { return GetAttribute(cudaDevAttrMultiProcessorCount, count); }

// The device is current while this lives, where status() is Ok.
class ScopedDevice {
 public:
  explicit ScopedDevice(int ordinal) : status_(Enter(ordinal)) {}
  ~ScopedDevice() {
    if (before_ >= 0) cudaSetDevice(before_);
  }
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

  const Status& status() const { return status_; }

 private:
  Status Enter(int ordinal) {
    TE_JAX_TRY(Check(cudaGetDevice(&before_), "cudaGetDevice"));
    return before_ == ordinal ? Status::Ok() : Check(cudaSetDevice(ordinal), "cudaSetDevice");
  }

  int before_ = -1;
  Status status_;
};

// While this lives, the thread may call what CUDA refuses it while a graph is recorded, such as allocations and waits.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace te
