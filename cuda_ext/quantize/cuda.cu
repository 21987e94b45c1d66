// Launches the kernels.
//
// Bytes per bfloat16 value for both copies: 4 in one pass (block and delayed scaling), 6 with a pass for the amax
// before (current and row scaling). On an H200 (4.3 TB/s measured) 8192 × 8192 values cannot take less than 62 and 94
// µs. Arithmetic: 5 to 8 instructions a value, a quarter of that time.
//
// The amax pass walks forwards and the quantizing pass backwards: the values that were read last are still in the L2
// cache (60 MB).

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/cuda_status.h"
#include "common/dependent_launch.cuh"
#include "common/once_per_device.h"
#include "common/vector.cuh"
#include "quantize/amax.cuh"
#include "quantize/kernel.cuh"
#include "quantize/launch.cuh"
#include "quantize/quantize.h"

namespace te::quantize {
namespace {

template <typename T, typename F, typename M>
Status Launch(cudaStream_t stream, const Arguments& arguments) {
  TensorMaps maps{};
  if (arguments.shape.aligned &&
      !(DescribeValues<T>(arguments.x, arguments.shape, &maps.x) && DescribeCopies<T>(arguments, &maps))) {
    return Status::Failed("cuTensorMapEncodeTiled refuses x or a copy of it");
  }
  auto* kernel = QuantizeTile<T, F, M>;
  constexpr int kBytes = sizeof(Shared<T>);
  static OncePerDevice attributes;
  const cudaError_t error = attributes.Run([kernel] {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
  });
  if (Status s = Check(error, "cudaFuncSetAttribute"); !s.ok()) return s;
  const Shape& shape = arguments.shape;
  const int64_t tiles = int64_t{shape.count} * shape.TilesDown() * shape.TilesAcross();
  return Check(LaunchAsDependent(kernel, static_cast<unsigned>(tiles), kThreads, kBytes, stream, maps, arguments),
               "kernel launch");
}

template <typename M>
Status Select(cudaStream_t stream, const Matrices& x, Fp8 format, const Arguments& arguments) {
  auto with = [&]<typename F>() {
    auto* launch = x.dtype == DType::kFloat32    ? Launch<float, F, M>
                   : x.dtype == DType::kBFloat16 ? Launch<__nv_bfloat16, F, M>
                                                 : Launch<__half, F, M>;
    return launch(stream, arguments);
  };
  return format == Fp8::kE4M3 ? with.template operator()<E4M3>() : with.template operator()<E5M2>();
}

// The number of thread blocks for each of `count` tensors of `chunks`, where `slots` run at a time: the smallest of the
// numbers with which all end first, if every chunk takes the same time.
int64_t BlocksPerTensor(int64_t count, int64_t chunks, int64_t slots) {
  int64_t best = 1, best_time = INT64_MAX;
  for (int64_t blocks = 1; blocks <= std::min(chunks, slots); ++blocks) {
    const int64_t time = ((count * blocks + slots - 1) / slots) * ((chunks + blocks - 1) / blocks);
    if (time < best_time) best = blocks, best_time = time;
  }
  return best;
}

template <typename T>
Status LaunchAmaxOfTensor(cudaStream_t stream, const Matrices& x, int multiprocessors, float* amax) {
  const int64_t values = x.rows * x.cols;
  const int64_t chunk = int64_t{kAmaxThreads} * kAmaxUnroll * kPer16Bytes<T>;
  const int64_t blocks = BlocksPerTensor(x.count, (values + chunk - 1) / chunk, int64_t{multiprocessors} * kAmaxBlocks);
  const bool aligned = OnSixteenBytes(x.data) && (x.count == 1 || values % kPer16Bytes<T> == 0);
  return Check(LaunchAsDependent(AmaxOfValues<T>, static_cast<unsigned>(x.count * blocks), kAmaxThreads, 0, stream,
                                 static_cast<const T*>(x.data), values, static_cast<unsigned>(blocks), aligned, amax),
               "kernel launch");
}

template <typename T>
Status LaunchAmaxOfRows(cudaStream_t stream, const Matrices& x, int multiprocessors, float* row_amax, float* col_amax) {
  const Shape shape = ShapeOf(x, {x.data});
  const int64_t strips =
      int64_t{shape.count} * ((shape.TilesDown() - 1) / kTilesPerColumnStrip + 1) * shape.TilesAcross();
  const int64_t blocks = std::min<int64_t>(strips, int64_t{multiprocessors} * kRowAmaxBlocks<T>);
  return Check(LaunchAsDependent(AmaxOfRowsAndColumns<T>, static_cast<unsigned>(blocks), kThreads, 0, stream,
                                 static_cast<const T*>(x.data), shape, row_amax, col_amax),
               "kernel launch");
}

}  // namespace

Status AmaxOfTensor(const Executor& executor, const Matrices& x, float* amax) {
  if (x.count > INT32_MAX) return Status::Failed("x has " + std::to_string(x.count) + " tensors; 2^31 are too many");
  int multiprocessors = 0;
  if (Status s = CountMultiprocessors(&multiprocessors); !s.ok()) return s;
  if (Status s = Clear(executor.stream, {amax, x.count}); !s.ok()) return s;
  auto* launch = x.dtype == DType::kFloat32    ? LaunchAmaxOfTensor<float>
                 : x.dtype == DType::kBFloat16 ? LaunchAmaxOfTensor<__nv_bfloat16>
                                               : LaunchAmaxOfTensor<__half>;
  return launch(executor.stream, x, multiprocessors, amax);
}

Status AmaxOfRows(const Executor& executor, const Matrices& x, float* row_amax, float* col_amax) {
  int multiprocessors = 0;
  if (Status s = CountMultiprocessors(&multiprocessors); !s.ok()) return s;
  if (Status s = CheckSize(x); !s.ok()) return s;
  if (Status s = Clear(executor.stream, {row_amax, x.count * x.rows}, {col_amax, x.count * x.cols}); !s.ok()) return s;
  auto* launch = x.dtype == DType::kFloat32    ? LaunchAmaxOfRows<float>
                 : x.dtype == DType::kBFloat16 ? LaunchAmaxOfRows<__nv_bfloat16>
                                               : LaunchAmaxOfRows<__half>;
  return launch(executor.stream, x, multiprocessors, row_amax, col_amax);
}

Status QuantizeTensor(const Executor& executor, const Matrices& x, const Copies& copies, const TensorScaling& scaling) {
  if (Status s = CheckSize(x); !s.ok()) return s;
  Arguments arguments = ArgumentsOf(x, copies);
  if (scaling.own_amax != nullptr) {
    if (Status s = Clear(executor.stream, {scaling.own_amax, x.count}); !s.ok()) return s;
  }
  arguments.tensor = scaling;
  return Select<Mode<Scales::kTensor>>(executor.stream, x, copies.format, arguments);
}

Status QuantizeRows(const Executor& executor, const Matrices& x, const Copies& copies, const RowScaling& scaling) {
  if (Status s = CheckSize(x); !s.ok()) return s;
  Arguments arguments = ArgumentsOf(x, copies);
  arguments.rows = scaling;
  return Select<Mode<Scales::kRows>>(executor.stream, x, copies.format, arguments);
}

Status QuantizeBlocks(const Executor& executor, const Matrices& x, const Copies& copies, const BlockScaling& scaling) {
  if (Status s = CheckSize(x); !s.ok()) return s;
  Arguments arguments = ArgumentsOf(x, copies);
  arguments.blocks = scaling;
  // An absent copy counts as one with scales of 128×128, which cost least.
  const bool data_128x128 = !copies.data || scaling.data_128x128;
  const bool transposed_128x128 = !copies.transposed || scaling.transposed_128x128;
  auto* select = data_128x128 ? (transposed_128x128 ? Select<Mode<Scales::kBlocks, true, true>>
                                                    : Select<Mode<Scales::kBlocks, true, false>>)
                              : (transposed_128x128 ? Select<Mode<Scales::kBlocks, false, true>>
                                                    : Select<Mode<Scales::kBlocks, false, false>>);
  return select(executor.stream, x, copies.format, arguments);
}

}  // namespace te::quantize
