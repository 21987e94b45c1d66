// 16-byte global accesses, and their elements as float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace te {

// How many elements of T one 16-byte access holds.
template <typename T>
inline constexpr int kPer16Bytes = 16 / sizeof(T);

inline bool OnSixteenBytes(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

__device__ inline float ToFloat(float x) { return x; }
__device__ inline float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float ToFloat(__half x) { return __half2float(x); }

template <typename T>
__device__ T FromFloat(float x);
template <>
__device__ inline float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}

__device__ inline void Unpack(const uint4& bits, float (&out)[4], const float*) {
  out[0] = __uint_as_float(bits.x);
  out[1] = __uint_as_float(bits.y);
  out[2] = __uint_as_float(bits.z);
  out[3] = __uint_as_float(bits.w);
}

// bfloat16 is the upper half of a float: a shift and a mask, no conversion instruction.
__device__ inline void Unpack(const uint4& bits, float (&out)[8], const __nv_bfloat16*) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ inline void Unpack(const uint4& bits, float (&out)[8], const __half*) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
    out[2 * i] = pair.x;
    out[2 * i + 1] = pair.y;
  }
}

// The 16 bytes that Unpack would read as these elements.
__device__ inline uint4 Pack(const float (&in)[4], const float*) {
  return make_uint4(__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]), __float_as_uint(in[3]));
}

__device__ inline uint4 Pack(const float (&in)[8], const __nv_bfloat16*) {
  __nv_bfloat162 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
  return reinterpret_cast<const uint4&>(pairs);
}

__device__ inline uint4 Pack(const float (&in)[8], const __half*) {
  __half2 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2half2_rn(in[2 * i], in[2 * i + 1]);
  return reinterpret_cast<const uint4&>(pairs);
}

// Data that is touched once: kept out of L1. Not the non-coherent path, since a kernel may write over what it reads.
__device__ inline uint4 LoadStreaming(const uint4* address) {
  uint4 bits;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(address));
  return bits;
}

// The same, where the other half of its line of 128 bytes is read soon: L2 fetches both at once.
__device__ inline uint4 LoadStreamingLine(const uint4* address) {
  uint4 bits;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(address));
  return bits;
}

// First to be evicted from L2: what is written here is larger than the cache and read much later.
__device__ inline void StoreStreaming(uint4* address, const uint4& bits) { __stcs(address, bits); }

}  // namespace te
