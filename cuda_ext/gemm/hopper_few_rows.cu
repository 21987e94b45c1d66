// Products with scales of blocks and few rows of a, as a decoder has: b is read once, and nothing else counts.
//
// A thread block has 16 columns of d, which are the rows of its instruction's first operand, and every kWarps-th block
// of 128 values of k. It reads b and a from global memory as the instruction wants them in registers: of which values
// of k a lane has is its own choice, as long as both operands agree, so each lane takes 16 bytes that follow each
// other. The next two blocks are on their way while one is multiplied. The warps of a thread block then add their sums
// in order.
//
// A kernel that starts before the one in front of it has ended brings its first blocks of b to L2, whatever they will
// be, and reads them when they are.
//
// Bytes nk, once. The floor at 4.3 TB/s (H200) is 3.9 µs for 4096 × 4096; tiles of 64 rows would leave three quarters
// of the multiprocessors without one.
#include <cuda_bf16.h>

#include <cstdint>

#include "common/cuda_status.h"
#include "common/dependent_launch.cuh"
#include "common/vector.cuh"
#include "gemm/hopper.h"
#include "gemm/hopper_tiles.h"
#include "gemm/hopper_wgmma.cuh"

namespace te::gemm::hopper {
namespace {

inline constexpr int kBlock = static_cast<int>(kBlockSize);
inline constexpr int kColumns = 16;  // of d, for each thread block; n is a multiple of them
inline constexpr int kDepth = 2;     // blocks of k on their way

// d += a · b for 16 rows of a and 8 columns of b, over 32 values: b's of the problem, and a's.
template <Formats kFormats>
__device__ __forceinline__ void Multiply16x8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#define TE_MMA(formats)                                                               \
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." formats                       \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (kFormats == Formats::kE4M3E4M3) TE_MMA("e4m3.e4m3");
  if constexpr (kFormats == Formats::kE5M2E4M3) TE_MMA("e4m3.e5m2");
  if constexpr (kFormats == Formats::kE4M3E5M2) TE_MMA("e5m2.e4m3");
#undef TE_MMA
}

// What a lane has of a block of k: of a row of b and of the one eight below, in halves of 64 values, and their scales.
template <int kEights>
struct Stage {
  uint4 b[2][2];
  float b_scale;
  uint4 a[2];  // with eight rows: with more it would be too many registers
  float a_scales[kEights][2];
};

template <Formats kFormats, int kEights, int kWarps>
__global__ void __launch_bounds__(32 * kWarps) MultiplyFewRows(const Problem p) {
  __shared__ float sums[kWarps][8 * kEights][kColumns + 4];  // each row begins at another bank
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int m = static_cast<int>(p.m), n = static_cast<int>(p.n), k = static_cast<int>(p.k);
  const int blocks = (k + kBlock - 1) / kBlock;
  const int row = lane / 4, first = lane % 4 * 16;
  const StridedBatch& batch = p.batch;
  const int64_t product = blockIdx.x / (n / kColumns);
  const int n0 = blockIdx.x % (n / kColumns) * kColumns;
  const auto* const a = static_cast<const uint8_t*>(p.a.data) + product * batch.a_stride;
  const auto* const columns = static_cast<const uint8_t*>(p.b.data) + product * batch.b_stride + int64_t{n0} * k;
  const auto* const b = columns + int64_t{row} * k;
  const float* const a_scales = p.a.scales + product * batch.a_scales_stride;
  const float* const b_scales = p.b.scales + product * batch.b_scales_stride + int64_t{n0 / kBlock} * blocks;
  static_assert(kDepth * kColumns == 32);
  if (const int block = warp + lane / kColumns * kWarps; block < blocks) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(columns + int64_t{lane % kColumns} * k + block * kBlock));
  }
  WaitForPrimary();
  ReleaseDependents();

  auto load_a = [&](int block, int eight, uint4(&to)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of_a = eight * 8 + row, at = block * kBlock + half * 64 + first;
      to[half] = of_a < m && at < k ? __ldg(reinterpret_cast<const uint4*>(a + int64_t{of_a} * k + at)) : uint4{};
    }
  };
  auto load = [&](int block, Stage<kEights>& to) {
    const bool inside = block < blocks;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = block * kBlock + half * 64 + first;
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const auto* const from = reinterpret_cast<const uint4*>(b + int64_t{below * 8} * k + at);
        to.b[half][below] = inside && at < k ? LoadStreamingLine(from) : uint4{};
      }
    }
    to.b_scale = inside ? __ldg(b_scales + block) : 0.0f;
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int of_a = eight * 8 + lane % 4 * 2 + i;
        to.a_scales[eight][i] = block < blocks && of_a < m ? __ldg(a_scales + int64_t{block} * m + of_a) : 0.0f;
      }
    }
    if constexpr (kEights == 1) load_a(block, 0, to.a);
  };

  float total[kEights][4] = {};
  Stage<kEights> stages[kDepth];
#pragma unroll
  for (int i = 0; i < kDepth; ++i) load(warp + i * kWarps, stages[i]);
  for (int next = warp; next < blocks; next += kDepth * kWarps) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const int block = next + i * kWarps;
      const Stage<kEights> stage = stages[i];
      load(block + kDepth * kWarps, stages[i]);
      if (block >= blocks) continue;
#pragma unroll
      for (int eight = 0; eight < kEights; ++eight) {
        uint4 of_a[2];
        if constexpr (kEights == 1) {
          of_a[0] = stage.a[0], of_a[1] = stage.a[1];
        } else {
          load_a(block, eight, of_a);
        }
        float partial[2][4] = {};  // neither waits for the other
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 &above = stage.b[half][0], &below = stage.b[half][1], &of_rows = of_a[half];
          Multiply16x8<kFormats>(partial[half], {above.x, below.x, above.y, below.y}, {of_rows.x, of_rows.y});
          Multiply16x8<kFormats>(partial[half], {above.z, below.z, above.w, below.w}, {of_rows.z, of_rows.w});
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          total[eight][j] += stage.b_scale * stage.a_scales[eight][j % 2] * (partial[0][j] + partial[1][j]);
        }
      }
    }
  }

#pragma unroll
  for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sums[warp][eight * 8 + lane % 4 * 2 + j % 2][row + j / 2 * 8] = total[eight][j];
    }
  }
  __syncthreads();
  auto write = [&]<typename T>(const T*) {
    for (int i = threadIdx.x; i < 8 * kEights * kColumns; i += blockDim.x) {
      const int of_a = i / kColumns, column = i % kColumns, of_d = n0 + column;
      if (of_a >= m) continue;
      float sum = 0.0f;
#pragma unroll
      for (int of_k = 0; of_k < kWarps; ++of_k) sum += sums[of_k][of_a][column];
      const int64_t at = product * batch.d_stride + int64_t{of_a} * n + of_d;
      if (p.bias) sum += ToFloat(static_cast<const T*>(p.bias)[product * batch.bias_stride + of_d]);
      if (p.accumulator) sum += ToFloat(static_cast<const T*>(p.accumulator)[at]);
      static_cast<T*>(p.d)[at] = FromFloat<T>(sum);
    }
  };
  if (p.d_type == Type::kFloat32) {
    write(static_cast<const float*>(nullptr));
  } else {
    write(static_cast<const __nv_bfloat16*>(nullptr));
  }
}

template <Formats kFormats, int kEights, int kWarps>
Status LaunchFewRows(cudaStream_t stream, const Problem& p) {
  const auto blocks = static_cast<unsigned>(p.batch.count * (p.n / kColumns));
  return Check(LaunchAsDependent(MultiplyFewRows<kFormats, kEights, kWarps>, blocks, 32 * kWarps, 0, stream, p),
               "kernel launch");
}

// Few thread blocks divide k further.
template <Formats kFormats>
Status RunFewRowsOf(cudaStream_t stream, const Problem& p) {
  if (p.m > 8) return LaunchFewRows<kFormats, 2, 8>(stream, p);
  return p.n * p.batch.count > 4608 ? LaunchFewRows<kFormats, 1, 4>(stream, p)
                                    : LaunchFewRows<kFormats, 1, 8>(stream, p);
}

}  // namespace

Status RunFewRows(cudaStream_t stream, const Problem& p) {
  if (p.a.type == Type::kE5M2) return RunFewRowsOf<Formats::kE5M2E4M3>(stream, p);
  if (p.b.type == Type::kE5M2) return RunFewRowsOf<Formats::kE4M3E5M2>(stream, p);
  return RunFewRowsOf<Formats::kE4M3E4M3>(stream, p);
}

}  // namespace te::gemm::hopper
