// `ConversionOf` of cpu_float.h, for each dtype and instruction set.
#include "common/cpu_float.h"

namespace te {
namespace {

template <typename T>
TE_JAX_INLINE void Load(const void* from, int64_t count, float* to) {
  const T* values = static_cast<const T*>(from);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = ToFloat(values[i]);
}

template <typename T>
TE_JAX_INLINE void Store(const float* from, int64_t count, void* to) {
  T* values = static_cast<T*>(to);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) FromFloat(from[i], &values[i]);
}

template <typename T>
TE_JAX_INLINE void Add(const void* from, int64_t count, float* to) {
  const T* values = static_cast<const T*>(from);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    T rounded;
    FromFloat(to[i] + ToFloat(values[i]), &rounded);
    to[i] = ToFloat(rounded);
  }
}

#define TE_JAX_CONVERT(T)                                                                                \
  TE_JAX_CLONES void Load##T(const void* from, int64_t count, float* to) { Load<T>(from, count, to); }   \
  TE_JAX_CLONES void Store##T(const float* from, int64_t count, void* to) { Store<T>(from, count, to); } \
  TE_JAX_CLONES void Add##T(const void* from, int64_t count, float* to) { Add<T>(from, count, to); }
TE_JAX_CONVERT(Float32)
TE_JAX_CONVERT(BFloat16)
#undef TE_JAX_CONVERT

}  // namespace

Conversion ConversionOf(DType dtype) {
  return dtype == DType::kFloat32 ? Conversion{4, LoadFloat32, StoreFloat32, AddFloat32}
                                  : Conversion{2, LoadBFloat16, StoreBFloat16, AddBFloat16};
}

}  // namespace te
