// The floating-point types of CPU kernels, and how their loops are compiled: written for the vectoriser, for three
// instruction sets, of which the best is picked when the library is loaded, so that one wheel is fast on every x86-64.
#pragma once

#include <bit>
#include <cstdint>

#include "common/dtype.h"

// Marks a function that is compiled for each instruction set. It does not apply to templates: one plain function for
// each type. Sanitizers cannot instrument the resolvers that it makes.
#if defined(__x86_64__) && defined(__linux__) && !defined(TE_JAX_SANITIZE) && \
    ((defined(__clang__) && __clang_major__ >= 17) || (!defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 12))
#define TE_JAX_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TE_JAX_CLONES
#endif
// Each clone must get its own copy of what it calls, compiled for its instruction set.
#define TE_JAX_INLINE inline __attribute__((always_inline))

namespace te {

using Float32 = float;
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

TE_JAX_INLINE float ToFloat(float x) { return x; }
TE_JAX_INLINE float ToFloat(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
// Integer arithmetic rather than a conversion instruction: it vectorises everywhere, and subnormals survive the
// flush-to-zero mode that XLA sets on its threads.
TE_JAX_INLINE float ToFloat(Float16 x) {
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13;
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  const float normal = std::bit_cast<float>(magnitude + ((127 - 15) << 23));
  const float special = std::bit_cast<float>(magnitude | 0x7f800000u);
  const float subnormal = std::bit_cast<float>(magnitude + ((127 - 14) << 23)) - 0x1p-14f;
  const float value = magnitude < (1u << 23) ? subnormal : magnitude >= (31u << 23) ? special : normal;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

TE_JAX_INLINE void FromFloat(float x, float* out) { *out = x; }

// Both round to nearest even, as hardware does.
TE_JAX_INLINE void FromFloat(float x, BFloat16* out) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
TE_JAX_INLINE void FromFloat(float x, Float16* out) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 leaves exactly the bits of a subnormal float16 at the end of the mantissa, rounded.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  out->bits = static_cast<uint16_t>((magnitude >= (143u << 23) ? special : finite) | ((bits >> 16) & 0x8000u));
}

// How arrays of a dtype become floats, and floats such arrays.
struct Conversion {
  int64_t bytes;  // of one value
  void (*load)(const void* from, int64_t count, float* to);
  void (*store)(const float* from, int64_t count, void* to);
  void (*add)(const void* from, int64_t count, float* to);  // adds, and rounds each sum to the dtype
};

Conversion ConversionOf(DType dtype);

}  // namespace te
