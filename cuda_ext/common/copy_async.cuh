// Copies of 16 bytes from global to shared memory that do not pass through registers.
#pragma once

#include <cstdint>

#include "common/tma.cuh"

namespace te {

// Starts a copy of 16 bytes, or without `inside` one of zeros, which reads nothing.
__device__ __forceinline__ void CopyAsync(void* to, const void* from, bool inside = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(to)), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}

// Waits for the copies that this thread has started.
__device__ __forceinline__ void CopyAsyncWait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace te
