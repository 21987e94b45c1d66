// What thread blocks may have on the current GPU. Kernels choose by it when they are launched: GPUs of compute
// capability 9.0 and 10.0 have 227 KB of shared memory for a thread block, those of 12.0 have 99.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "common/cuda_status.h"

namespace te {

inline constexpr int kLeastSharedBytes = 99 << 10;

// TE_JAX_TEST_SMALL_GPU=1 lets tests see any GPU as one with the least shared memory, and without clusters.
inline bool IsSmallForTests() {
  static const bool small = [] {
    const char* value = std::getenv("TE_JAX_TEST_SMALL_GPU");
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
  return small;
}

inline Status CountSharedBytes(int* bytes) {
  Status status = GetAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, bytes);
  if (IsSmallForTests()) *bytes = std::min(*bytes, kLeastSharedBytes);
  return status;
}

// Whether thread blocks of a cluster can reach each other's shared memory.
inline Status HasClusters(bool* has) {
  int value = 0;
  Status status = GetAttribute(cudaDevAttrClusterLaunch, &value);
  *has = value != 0 && !IsSmallForTests();
  return status;
}

}  // namespace te
