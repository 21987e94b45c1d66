// Launches in clusters of thread blocks.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "common/block_limits.h"
#include "common/cuda_status.h"

namespace te::softmax_cross_entropy {

inline constexpr int kMaxCluster = 8;  // the largest size that every GPU with clusters can schedule

// The most thread blocks of a cluster on this GPU.
inline Status MostOfCluster(int* most) {
  bool has = false;
  Status status = HasClusters(&has);
  *most = has ? kMaxCluster : 1;
  return status;
}

template <typename... Parameters, typename... Arguments>
Status Launch(cudaStream_t stream, void (*kernel)(Parameters...), int64_t blocks, dim3 threads, int cluster,
              int dynamic_bytes, Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  // Kernels loop over what does not fit into one grid.
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(blocks, INT_MAX / cluster * cluster)));
  config.blockDim = threads;
  config.dynamicSmemBytes = dynamic_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return Check(cudaLaunchKernelEx(&config, kernel, arguments...), "kernel launch");
}

}  // namespace te::softmax_cross_entropy
