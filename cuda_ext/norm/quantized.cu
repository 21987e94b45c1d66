// FP8 from statistics that are known: a transposed copy or both, by the quantizing kernel (quantize/kernel.cuh).
//
// Bytes per bfloat16 value: 3 or 4. At 8192 × 4096 values and 3.0 TB/s (H100) that is 34 or 45 µs.

#include <cstdint>

#include "common/vector.cuh"
#include "norm/norm.h"
#include "norm/normalized.cuh"
#include "quantize/launch.cuh"

namespace te::norm {
namespace {

// What the quantizing kernel makes of a patch of x: y. It reads statistics and gamma while x is on its way.
struct NormalizePatch {
  Inputs inputs;
  Statistics statistics;

  template <typename T>
  struct Of {
    const float* of_beta;  // of the patch's example
    int rows, cols;        // of the matrix
    float gamma[quantize::kPatch];
    float mean[quantize::kPatch], rstd[quantize::kPatch];

    __device__ __forceinline__ void operator()(const quantize::ThreadCoord<T>& coord, quantize::Patch<T>& patch) const {
      using W = quantize::Words<T>;
      constexpr int kCount = W::kPerVector;
#pragma unroll
      for (int v = 0; v < W::kVectors; ++v) {
        float beta[kCount];
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          const int col = coord.Column(v * kCount + j);
          beta[j] = of_beta && col < cols ? of_beta[col] : 0.0f;
        }
#pragma unroll
        for (int r = 0; r < quantize::kPatch; ++r) {
          float y[kCount];
#pragma unroll
          for (int j = 0; j < kCount; ++j) {
            const bool inside = coord.row + r < rows && coord.Column(v * kCount + j) < cols;
            const float s = quantize::Value<T>(patch[r], v * kCount + j);
            y[j] = inside ? Normalized(s, mean[r], rstd[r], gamma[v * kCount + j], of_beta ? &beta[j] : nullptr) : 0.0f;
          }
          quantize::SetVector<T>(patch, r, v, Pack(y, static_cast<const T*>(nullptr)));
        }
      }
    }
  };

  template <typename T>
  __device__ __forceinline__ Of<T> For(const quantize::Tile& tile, const quantize::ThreadCoord<T>& coord) const {
    Of<T> of{inputs.beta ? inputs.beta + tile.example * inputs.cols : nullptr, static_cast<int>(inputs.rows),
             static_cast<int>(inputs.cols)};
#pragma unroll
    for (int j = 0; j < quantize::kPatch; ++j) {
      const int col = coord.Column(j), row = coord.row + j;
      of.gamma[j] = col < of.cols ? inputs.gamma[tile.example * inputs.cols + col] : 0.0f;
      const int64_t index = tile.example * inputs.rows + row;
      of.mean[j] = statistics.mean && row < of.rows ? statistics.mean[index] : 0.0f;
      of.rstd[j] = row < of.rows ? statistics.rstd[index] : 0.0f;
    }
    return of;
  }
};

}  // namespace

Status NormalizedInTensor(const Executor& executor, const Inputs& inputs, const Statistics& statistics,
                          const quantize::Copies& copies, const quantize::TensorScaling& scaling) {
  const quantize::Matrices x{inputs.dtype, inputs.x, inputs.count, inputs.rows, inputs.cols};
  return quantize::LaunchQuantizeTensor(executor.stream, x, copies, scaling, NormalizePatch{inputs, statistics});
}

Status NormalizedInBlocks(const Executor& executor, const Inputs& inputs, const Statistics& statistics,
                          const quantize::Copies& copies, const quantize::BlockScaling& scaling) {
  const quantize::Matrices x{inputs.dtype, inputs.x, inputs.count, inputs.rows, inputs.cols};
  const NormalizePatch compute{inputs, statistics};
  using quantize::Mode, quantize::Scales;
  return copies.data && !scaling.data_128x128 ? quantize::LaunchQuantizeInMode<Mode<Scales::kBlocks, false, false>>(
                                                    executor.stream, x, copies, scaling, compute)
                                              : quantize::LaunchQuantizeInMode<Mode<Scales::kBlocks, true, false>>(
                                                    executor.stream, x, copies, scaling, compute);
}

}  // namespace te::norm
