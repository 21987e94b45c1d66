// TMA, Hopper's tensor memory accelerator: boxes of an array to and from shared memory, and the barriers that count the
// bytes of loads.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "common/cuda_driver.h"

namespace te {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Describes boxes of an array, whose sizes, and strides in bytes but for the first, are the innermost first.
template <int kDims>
bool DescribeBoxes(CUtensorMap* map, CUtensorMapDataType type, const void* array, const cuuint64_t (&sizes)[kDims],
                   const cuuint64_t (&strides)[kDims - 1], const cuuint32_t (&box)[kDims], CUtensorMapSwizzle swizzle,
                   CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  static const auto encode = FindInDriver<EncodeTiled>("cuTensorMapEncodeTiled");
  cuuint32_t steps[kDims];
  std::fill_n(steps, kDims, 1);
  return encode != nullptr &&
         encode(map, type, kDims, const_cast<void*>(array), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void BarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to TMA and to the cluster.
__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void BarrierExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// At a barrier of this thread block.
__device__ __forceinline__ void BarrierArriveHere(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void BarrierWait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Loads a box of a matrix; what lies outside it becomes zero.
__device__ __forceinline__ void LoadBox(uint32_t to, const CUtensorMap* map, int32_t column, int32_t row,
                                        uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

// The same, in three dimensions.
__device__ __forceinline__ void LoadBox(uint32_t to, const CUtensorMap* map, int32_t x, int32_t y, int32_t z,
                                        uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Makes this thread's writes to shared memory visible to TMA.
__device__ __forceinline__ void AsyncProxyFence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Writes a box of shared memory to an array, without what lies outside it.
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, int32_t x, int32_t y, int32_t z, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(from), "r"(x), "r"(y), "r"(z)
               : "memory");
}

// The same, in four dimensions.
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, int32_t x, int32_t y, int32_t z, int32_t w,
                                         uint32_t from) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

__device__ __forceinline__ void BulkCommit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until what this thread has sent is read from shared memory.
__device__ __forceinline__ void BulkWaitRead() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace te
