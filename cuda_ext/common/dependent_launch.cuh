// Programmatic dependent launch: a kernel may start before the one in front of it on the stream, its primary, has
// ended. What it costs to start a kernel is hidden then: 1.6 µs (docs/measurements.md).
//
// A kernel launched like this must run WaitForPrimary in every block, before it reads what the primary wrote or writes
// what the primary reads. The same goes for all that came before the primary, unless the primary ran WaitForPrimary
// before ReleaseDependents.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace te {

// Lets the next kernel on the stream start once all blocks have said so or ended, if it was launched to do so.
__device__ __forceinline__ void ReleaseDependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// Waits until the primary has ended and what it wrote can be read. Nothing to wait for: no effect.
__device__ __forceinline__ void WaitForPrimary() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <typename... Parameters, typename... Values>
cudaError_t LaunchAsDependent(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, size_t shared_bytes,
                              cudaStream_t stream, const Values&... values) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, values...);
}

}  // namespace te
