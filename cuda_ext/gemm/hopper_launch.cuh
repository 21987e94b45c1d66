// Choosing a tile for a problem, and launching the kernel of one mode and pair of formats.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/copy_engine.cuh"
#include "common/cuda_status.h"
#include "common/once_per_device.h"
#include "gemm/hopper.h"
#include "gemm/hopper_kernel.cuh"

namespace te::gemm::hopper {

// Describes boxes of `box_rows` rows and 128 bytes of a row-major matrix.
inline bool DescribeMatrix(CUtensorMap* map, CUtensorMapDataType type, int size, const void* data, int64_t rows,
                           int64_t columns, int box_rows) {
  static const EncodeTiled encode = FindEncodeTiled();
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(columns * size)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(128 / size), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  return encode != nullptr &&
         encode(map, type, 2, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Describes boxes of `box` float32 values of one row.
inline bool DescribeRow(CUtensorMap* map, const float* data, int64_t values, int box) {
  static const EncodeTiled encode = FindEncodeTiled();
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(values), 1};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>((values + 3) / 4 * 16)};
  const cuuint32_t boxes[] = {static_cast<cuuint32_t>(box), 1}, steps[] = {1, 1};
  return encode != nullptr &&
         encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, const_cast<float*>(data), sizes, strides, boxes, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

inline CUtensorMapDataType TensorMapType(DType type) {
  switch (type) {
    case DType::kFloat32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kBFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  }
}

struct Device {
  int ordinal = -1;
  int clusters = 0;  // of two multiprocessors
};

inline cudaError_t CurrentDevice(Device* device) {
  static thread_local Device known;
  int ordinal;
  if (const cudaError_t error = cudaGetDevice(&ordinal); error != cudaSuccess) return error;
  if (known.ordinal != ordinal) {
    int multiprocessors;
    const cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ordinal);
    if (error != cudaSuccess) return error;
    known = {ordinal, multiprocessors / 2};
  }
  *device = known;
  return cudaSuccess;
}

template <typename C>
int64_t ClusterTiles(const Problem& problem) {
  return int64_t{CeilDiv(problem.m, C::kClusterM)} * CeilDiv(problem.n, C::kClusterN);
}

// Cycles that a problem takes, from those of a step and of an epilogue (docs/measurements.md): what decides between
// configurations is how many rounds of clusters their tiles need.
template <typename C>
double Cycles(const Problem& problem, int clusters) {
  const double rounds = static_cast<double>((ClusterTiles<C>(problem) + clusters - 1) / clusters);
  return rounds * (CeilDiv(problem.k, C::kBK) * C::kStepCycles + C::kTileCycles);
}

template <typename C>
Status Launch(cudaStream_t stream, const Problem& problem, const Device& device) {
  Arguments arguments;
  arguments.problem = problem;
  constexpr CUtensorMapDataType kByte = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const int d_size = problem.d_type == DType::kFloat32 ? 4 : 2;
  if (!DescribeMatrix(&arguments.a, kByte, 1, problem.a, problem.m, problem.k, C::kBoxA) ||
      !DescribeMatrix(&arguments.b, kByte, 1, problem.b, problem.n, problem.k, C::kBoxB) ||
      !DescribeMatrix(&arguments.d, TensorMapType(problem.d_type), d_size, problem.d, problem.m, problem.n, 16)) {
    return Status::Failed("cuTensorMapEncodeTiled refuses the operands");
  }

  if constexpr (C::kMode == Mode::kBlock) {
    const int64_t steps = CeilDiv(problem.k, C::kBK), column_blocks = CeilDiv(problem.n, C::kBN);
    if (!DescribeRow(&arguments.a_scales, problem.a_scale_inv, steps * problem.m, C::kBoxScalesA) ||
        !DescribeRow(&arguments.b_scales, problem.b_scale_inv, column_blocks * steps, C::kBoxScalesB)) {
      return Status::Failed("cuTensorMapEncodeTiled refuses the scales");
    }
  }

  static OncePerDevice attributes;
  const cudaError_t error = attributes.Run(
      [] { return cudaFuncSetAttribute(Multiply<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytes); });
  if (Status s = Check(error, "cudaFuncSetAttribute"); !s.ok()) return s;

  const int clusters = static_cast<int>(std::min<int64_t>(ClusterTiles<C>(problem), device.clusters));
  Multiply<C><<<2 * clusters, C::kThreads, C::kBytes, stream>>>(arguments);
  return Check(cudaGetLastError(), "kernel launch");
}

// The configuration of fewest cycles.
template <typename First, typename Second>
Status LaunchBest(cudaStream_t stream, const Problem& problem) {
  Device device;
  if (Status s = Check(CurrentDevice(&device), "cudaGetDevice"); !s.ok()) return s;
  if (Cycles<Second>(problem, device.clusters) < Cycles<First>(problem, device.clusters)) {
    return Launch<Second>(stream, problem, device);
  }
  return Launch<First>(stream, problem, device);
}

// Three warpgroups with 64 rows each, or two with 128: 192 and 256 rows. Where one scale follows all sums and they are
// promoted, three stages are enough; what the fourth would take lets a tile of 16-bit values leave at once.
template <Formats kFormats, Mode kMode>
Status RunMode(cudaStream_t stream, const Problem& problem) {
  using Second = std::conditional_t<kMode == Mode::kPromote, Config<kFormats, kMode, 2, 2, 3, 4>,
                                    Config<kFormats, kMode, 2, 2, 4, 1>>;
  return LaunchBest<Config<kFormats, kMode, 3, 1, 4, 2>, Second>(stream, problem);
}

template <Mode kMode>
Status RunFormats(cudaStream_t stream, const Problem& problem) {
  if (problem.a_is_e5m2) return RunMode<Formats::kE5M2E4M3, kMode>(stream, problem);
  if (problem.b_is_e5m2) return RunMode<Formats::kE4M3E5M2, kMode>(stream, problem);
  return RunMode<Formats::kE4M3E4M3, kMode>(stream, problem);
}

// One for each mode, in a file of its own: they compile side by side.
Status RunFast(cudaStream_t stream, const Problem& problem);
Status RunPromoted(cudaStream_t stream, const Problem& problem);
Status RunBlock(cudaStream_t stream, const Problem& problem);

}  // namespace te::gemm::hopper
