// wgmma of operands that are both in shared memory: 64 × 128 accumulators over 32 bytes of k, FP8 or of 16 bits.
#pragma once

#include <cstdint>

namespace te::gemm::hopper {

// Formats of the two operands.
enum class Formats { kE4M3E4M3, kE5M2E4M3, kE4M3E5M2, kBFloat16, kFloat16 };

constexpr int BytesOf(Formats formats) { return formats == Formats::kBFloat16 || formats == Formats::kFloat16 ? 2 : 1; }

#define TE_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TE_F16(d, i) TE_F4(d, i), TE_F4(d, i + 4), TE_F4(d, i + 8), TE_F4(d, i + 12)
#define TE_F64(d, i) TE_F16(d, i), TE_F16(d, i + 16), TE_F16(d, i + 32), TE_F16(d, i + 48)

#define TE_WGMMA(shape, formats, layouts)                                           \
  asm volatile(                                                                     \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                              \
      "wgmma.mma_async.sync.aligned.m64n128" shape ".f32." formats                  \
      " {"                                                                          \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "           \
      "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
      "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, " \
      "%45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
      "%60, %61, %62, %63"                                                          \
      "}, %64, %65, add, 1, 1" layouts ";\n}"                                       \
      : TE_F64(d, 0)                                                                \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))

// d = a · b, + d where add. Only 16-bit operands may have the summed values first.
template <Formats kFormats, bool kASummedFirst = false, bool kBSummedFirst = false>
__device__ __forceinline__ void Wgmma(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  static_assert(BytesOf(kFormats) == 2 ? kASummedFirst <= kBSummedFirst : !kASummedFirst && !kBSummedFirst);
  if constexpr (kFormats == Formats::kE4M3E4M3) TE_WGMMA("k32", "e4m3.e4m3", "");
  if constexpr (kFormats == Formats::kE5M2E4M3) TE_WGMMA("k32", "e5m2.e4m3", "");
  if constexpr (kFormats == Formats::kE4M3E5M2) TE_WGMMA("k32", "e4m3.e5m2", "");
#define TE_WGMMA_16(formats)            \
  if constexpr (kASummedFirst) {        \
    TE_WGMMA("k16", formats, ", 1, 1"); \
  } else if constexpr (kBSummedFirst) { \
    TE_WGMMA("k16", formats, ", 0, 1"); \
  } else {                              \
    TE_WGMMA("k16", formats, ", 0, 0"); \
  }
  if constexpr (kFormats == Formats::kBFloat16) TE_WGMMA_16("bf16.bf16")
  if constexpr (kFormats == Formats::kFloat16) TE_WGMMA_16("f16.f16")
#undef TE_WGMMA_16
}

#undef TE_WGMMA
#undef TE_F64
#undef TE_F16
#undef TE_F4

}  // namespace te::gemm::hopper
