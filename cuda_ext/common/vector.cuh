// 16-byte global loads, and their elements as float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace te {

// How many elements of T one 16-byte access holds.
template <typename T>
inline constexpr int kPer16Bytes = 16 / sizeof(T);

__device__ inline float ToFloat(float x) { return x; }
__device__ inline float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float ToFloat(__half x) { return __half2float(x); }

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

// Read-only data that a thread block touches once: keep it out of L1.
__device__ inline uint4 LoadStreaming(const uint4* address) {
  uint4 bits;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(address));
  return bits;
}

}  // namespace te
