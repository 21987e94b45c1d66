// What the host does before a launch of kernels that end with EncodeTile: checks, shapes and tensor maps; and launches
// of the quantizing kernel, with what it computes on the way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "common/block_limits.h"
#include "common/cuda_status.h"
#include "common/dependent_launch.cuh"
#include "common/tma.cuh"
#include "common/vector.cuh"
#include "quantize/amax.cuh"
#include "quantize/kernel.cuh"
#include "quantize/quantize.h"

namespace te::quantize {

// Indices of rows, columns and tiles are 32-bit integers.
inline Status CheckSize(const Matrices& x) {
  const int64_t down = (x.rows + kTile - 1) / kTile, across = (x.cols + kTile - 1) / kTile;
  if (std::max(x.rows, x.cols) < INT32_MAX - kTile && x.count * down * across < INT32_MAX / 2) return Status::Ok();
  const std::string count = x.count == 1 ? "a matrix" : std::to_string(x.count) + " matrices";
  return Status::Failed("x is too large as " + count + " of " + std::to_string(x.rows) + " × " +
                        std::to_string(x.cols) +
                        " values; rows and columns must be below 2^31 and tiles of 128 × 128 below 2^30");
}

// The shape of x, and of arrays beside it; pointers may be null.
inline Shape ShapeOf(const Matrices& x, std::initializer_list<const void*> arrays) {
  const bool aligned =
      x.rows % 16 == 0 && x.cols % 16 == 0 && std::all_of(arrays.begin(), arrays.end(), OnSixteenBytes);
  return {static_cast<int>(x.count), static_cast<int>(x.rows), static_cast<int>(x.cols), aligned};
}

inline Arguments ArgumentsOf(const Matrices& x, const Copies& copies) {
  Arguments arguments{};
  arguments.x = x.data;
  arguments.shape = ShapeOf(x, {x.data, copies.data, copies.transposed});
  arguments.power_of_two_scales = copies.power_of_two_scales;
  arguments.data = copies.data;
  arguments.transposed = copies.transposed;
  arguments.column_sums = copies.column_sums;
  return arguments;
}

template <typename T>
bool DescribeValues(const void* x, const Shape& shape, CUtensorMap* map) {
  const cuuint64_t count = shape.count, rows = shape.rows, cols = shape.cols;
  constexpr CUtensorMapDataType kValue =
      sizeof(T) == 4 ? CU_TENSOR_MAP_DATA_TYPE_UINT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  return DescribeBoxes<3>(map, kValue, x, {cols, rows, count}, {cols * sizeof(T), rows * cols * sizeof(T)},
                          {kTile, kTile, 1}, CU_TENSOR_MAP_SWIZZLE_NONE);
}

template <typename T>
bool DescribeCopies(const Arguments& arguments, TensorMaps* maps) {
  const cuuint64_t count = arguments.shape.count, rows = arguments.shape.rows, cols = arguments.shape.cols;
  constexpr cuuint32_t kVector = Words<T>::kPerVector;
  constexpr CUtensorMapDataType kCode = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return (!arguments.data || DescribeBoxes<3>(&maps->data, kCode, arguments.data, {cols, rows, count},
                                              {cols, rows * cols}, {kTile, kTile, 1}, CU_TENSOR_MAP_SWIZZLE_NONE)) &&
         (!arguments.transposed ||
          DescribeBoxes<4>(&maps->transposed, kCode, arguments.transposed, {rows, cols / kVector, kVector, count},
                           {rows * kVector, rows, rows * cols}, {kTile, kAcross, kVector, 1},
                           CU_TENSOR_MAP_SWIZZLE_128B));
}

// Blocks of kThreads with so many bytes of shared memory, of which there may be kMostBytes and what the GPU has.
template <auto kKernel, int kMostBytes, typename... Parameters>
Status LaunchBlocks(cudaStream_t stream, int64_t blocks, int bytes, const Parameters&... parameters) {
  int most = 0;
  if (Status s = CountSharedBytes(&most); !s.ok()) return s;
  most = std::min(most, kMostBytes);
  TE_JAX_TRY(SetAttributesOnce<kKernel>(
      {{cudaFuncAttributeMaxDynamicSharedMemorySize, most}, {cudaFuncAttributePreferredSharedMemoryCarveout, 100}}));
  return Check(LaunchAsDependent(kKernel, static_cast<unsigned>(blocks), kThreads, bytes, stream, parameters...),
               "kernel launch");
}

template <typename T, typename F, typename M, typename Compute>
Status LaunchQuantizeTile(cudaStream_t stream, Arguments arguments, const Compute& compute) {
  int most = 0;
  if (Status s = CountSharedBytes(&most); !s.ok()) return s;
  constexpr int kBytes = sizeof(Shared<T>);
  constexpr int kLeastBytes = sizeof(T) == 4 ? offsetof(Shared<T>, tile) : kBytes;
  static_assert(kLeastBytes <= kLeastSharedBytes);
  arguments.tile_fits = kBytes <= most;
  TensorMaps maps{};
  if (arguments.shape.aligned &&
      !(DescribeValues<T>(arguments.x, arguments.shape, &maps.x) && DescribeCopies<T>(arguments, &maps))) {
    return Status::Failed("cuTensorMapEncodeTiled refuses x or a copy of it");
  }
  return LaunchBlocks<QuantizeTile<T, F, M, Compute>, kBytes>(
      stream, arguments.shape.Tiles(), arguments.tile_fits ? kBytes : kLeastBytes, maps, arguments, compute);
}

// Calls launch<T, F>() with the types of values and codes.
template <typename Launch>
Status WithTypes(DType dtype, Fp8 format, const Launch& launch) {
  auto with = [&]<typename F>() {
    return dtype == DType::kFloat32 ? launch.template operator()<float, F>()
                                    : launch.template operator()<__nv_bfloat16, F>();
  };
  return format == Fp8::kE4M3 ? with.template operator()<E4M3>() : with.template operator()<E5M2>();
}

// Calls launch<M>() with the mode of both copies.
template <typename Launch>
Status WithModeOfBlocks(const Copies& copies, const BlockScaling& scaling, const Launch& launch) {
  auto with = [&]<bool kData128x128, bool kTransposed128x128>() {
    return launch.template operator()<Mode<Scales::kBlocks, kData128x128, kTransposed128x128>>();
  };
  // An absent copy counts as one with scales of 128×128, which cost least.
  const bool transposed_128x128 = !copies.transposed || scaling.transposed_128x128;
  if (!copies.data || scaling.data_128x128) {
    return transposed_128x128 ? with.template operator()<true, true>() : with.template operator()<true, false>();
  }
  return transposed_128x128 ? with.template operator()<false, true>() : with.template operator()<false, false>();
}

template <typename M, typename Compute>
Status LaunchQuantize(cudaStream_t stream, const Matrices& x, Fp8 format, const Arguments& arguments,
                      const Compute& compute) {
  return WithTypes(x.dtype, format, [&]<typename T, typename F>() {
    return LaunchQuantizeTile<T, F, M, Compute>(stream, arguments, compute);
  });
}

template <typename Compute>
Status LaunchQuantizeTensor(cudaStream_t stream, const Matrices& x, const Copies& copies, const TensorScaling& scaling,
                            const Compute& compute) {
  if (Status s = CheckSize(x); !s.ok()) return s;
  Arguments arguments = ArgumentsOf(x, copies);
  if (scaling.own_amax != nullptr) {
    if (Status s = Clear(stream, {scaling.own_amax, x.count}); !s.ok()) return s;
  }
  arguments.tensor = scaling;
  return LaunchQuantize<Mode<Scales::kTensor>>(stream, x, copies.format, arguments, compute);
}

template <typename M, typename Compute>
Status LaunchQuantizeInMode(cudaStream_t stream, const Matrices& x, const Copies& copies, const BlockScaling& scaling,
                            const Compute& compute) {
  if (Status s = CheckSize(x); !s.ok()) return s;
  Arguments arguments = ArgumentsOf(x, copies);
  arguments.blocks = scaling;
  return LaunchQuantize<M>(stream, x, copies.format, arguments, compute);
}

template <typename Compute>
Status LaunchQuantizeBlocks(cudaStream_t stream, const Matrices& x, const Copies& copies, const BlockScaling& scaling,
                            const Compute& compute) {
  return WithModeOfBlocks(copies, scaling,
                          [&]<typename M>() { return LaunchQuantizeInMode<M>(stream, x, copies, scaling, compute); });
}

}  // namespace te::quantize
