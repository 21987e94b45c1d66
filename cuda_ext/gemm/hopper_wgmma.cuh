// wgmma of FP8 operands, both in shared memory: 64 × kColumns accumulators over 32 values of k.
#pragma once

#include <cstdint>

namespace te::gemm::hopper {

// Formats of the two operands.
enum class Formats { kE4M3E4M3, kE5M2E4M3, kE4M3E5M2 };

#define TE_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TE_F16(d, i) TE_F4(d, i), TE_F4(d, i + 4), TE_F4(d, i + 8), TE_F4(d, i + 12)
#define TE_F64(d, i) TE_F16(d, i), TE_F16(d, i + 16), TE_F16(d, i + 32), TE_F16(d, i + 48)

#define TE_WGMMA_128(formats)                                                       \
  asm volatile(                                                                     \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                              \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." formats                        \
      " {"                                                                          \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "           \
      "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
      "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, " \
      "%45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
      "%60, %61, %62, %63"                                                          \
      "}, %64, %65, add, 1, 1;\n}"                                                  \
      : TE_F64(d, 0)                                                                \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))

#define TE_WGMMA_256(formats)                                                                      \
  asm volatile(                                                                                    \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"                                            \
      "wgmma.mma_async.sync.aligned.m64n256k32.f32." formats                                       \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "                          \
      "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "                \
      "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, "                \
      "%45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "                \
      "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, "                \
      "%75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, "                \
      "%90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "           \
      "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, " \
      "%120, %121, %122, %123, %124, %125, %126, %127"                                             \
      "}, %128, %129, add, 1, 1;\n}"                                                               \
      : TE_F64(d, 0), TE_F64(d, 64)                                                                \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))

// d = a · b, + d where add.
template <Formats kFormats, int kColumns>
__device__ __forceinline__ void Wgmma(float (&d)[kColumns / 2], uint64_t a, uint64_t b, bool add) {
  static_assert(kColumns == 128 || kColumns == 256);
  if constexpr (kColumns == 128) {
    if constexpr (kFormats == Formats::kE4M3E4M3) TE_WGMMA_128("e4m3.e4m3");
    if constexpr (kFormats == Formats::kE5M2E4M3) TE_WGMMA_128("e5m2.e4m3");
    if constexpr (kFormats == Formats::kE4M3E5M2) TE_WGMMA_128("e4m3.e5m2");
  } else {
    if constexpr (kFormats == Formats::kE4M3E4M3) TE_WGMMA_256("e4m3.e4m3");
    if constexpr (kFormats == Formats::kE5M2E4M3) TE_WGMMA_256("e5m2.e4m3");
    if constexpr (kFormats == Formats::kE4M3E5M2) TE_WGMMA_256("e4m3.e5m2");
  }
}

#undef TE_WGMMA_128
#undef TE_WGMMA_256
#undef TE_F64
#undef TE_F16
#undef TE_F4

}  // namespace te::gemm::hopper
