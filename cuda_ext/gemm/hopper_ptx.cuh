// Hopper's instructions that C++ has no name for, each wrapped once.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/tma.cuh"

namespace te::gemm::hopper {

// The same shared memory offset in another block of the cluster.
__device__ __forceinline__ uint32_t PeerAddress(uint32_t address, uint32_t rank) {
  uint32_t peer;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
  return peer;
}

// The value, which the assembler keeps in a register rather than work it out again wherever it is needed: that it comes
// back from this shuffle unchanged is more than it knows.
__device__ __forceinline__ uint32_t InRegister(uint32_t value) { return __shfl_sync(~0u, value, threadIdx.x % 32); }

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void ClusterSync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// At a barrier in any block of the cluster.
__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Whether a wait would be over at once.
__device__ __forceinline__ bool BarrierTest(uint32_t barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed != 0;
}

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// LoadBox into the same place of every block in `blocks`, whose own barriers count the bytes.
__device__ __forceinline__ void LoadBoxMulticast(uint32_t to, const CUtensorMap* map, int32_t x, int32_t y, int32_t z,
                                                 uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void WgmmaCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads and writes of an accumulator across the asynchronous products.
template <int kCount>
__device__ __forceinline__ void Pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Describes a tile of lines of 128 bytes, swizzled by 128 bytes: groups of eight lines are 1024 bytes apart. Units of
// 16 bytes, so that `TileAddress(address) + n` lies 16 n bytes further. A line is a row, all of whose values are summed
// over. Or the summed values come first: then a line is 64 values of 16 bits, one for each of 64 rows, and further rows
// lie 64 lines away (`SummedFirst`).
__device__ __forceinline__ uint32_t TileAddress(uint32_t address) { return (address & 0x3FFFF) >> 4; }
__device__ __forceinline__ uint64_t TileDescriptor(uint32_t tile_address, uint32_t group_stride = 1024) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t{group_stride >> 4} << 32 | tile_address;
}
__device__ __forceinline__ uint64_t SummedFirst(uint64_t descriptor) {
  return descriptor | uint64_t{64 * 128 >> 4} << 16;
}

__device__ __forceinline__ void StoreMatrices(uint32_t to, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r0), "r"(r1), "r"(r2),
               "r"(r3)
               : "memory");
}

__device__ __forceinline__ float LoadShared(uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}

__device__ __forceinline__ int LoadSharedInt(uint32_t from) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}

__device__ __forceinline__ void StoreShared(uint32_t to, int x) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

__device__ __forceinline__ uint4 LoadSharedChunk(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

__device__ __forceinline__ void StoreShared(uint32_t to, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// Until so many threads of the block, in whole warps, are here.
template <int kThreads>
__device__ __forceinline__ void SyncThreads() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

__device__ __forceinline__ void StoreShared(uint32_t to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}

// Adds it.
__device__ __forceinline__ void AddBox(const CUtensorMap* map, int32_t x, int32_t y, int32_t z, uint32_t from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void DeallocateRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void AllocateRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace te::gemm::hopper
