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
#include "common/vector.cuh"
#include "quantize/amax.cuh"
#include "quantize/kernel.cuh"
#include "quantize/launch.cuh"
#include "quantize/quantize.h"

namespace te::quantize {
namespace {

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
  auto* launch = x.dtype == DType::kFloat32 ? LaunchAmaxOfTensor<float> : LaunchAmaxOfTensor<__nv_bfloat16>;
  return launch(executor.stream, x, multiprocessors, amax);
}

Status AmaxOfRows(const Executor& executor, const Matrices& x, float* row_amax, float* col_amax) {
  int multiprocessors = 0;
  if (Status s = CountMultiprocessors(&multiprocessors); !s.ok()) return s;
  if (Status s = CheckSize(x); !s.ok()) return s;
  if (Status s = Clear(executor.stream, {row_amax, x.count * x.rows}, {col_amax, x.count * x.cols}); !s.ok()) return s;
  auto* launch = x.dtype == DType::kFloat32 ? LaunchAmaxOfRows<float> : LaunchAmaxOfRows<__nv_bfloat16>;
  return launch(executor.stream, x, multiprocessors, row_amax, col_amax);
}

Status QuantizeTensor(const Executor& executor, const Matrices& x, const Copies& copies, const TensorScaling& scaling) {
  return LaunchQuantizeTensor(executor.stream, x, copies, scaling, AsTheyAre{});
}

Status QuantizeRows(const Executor& executor, const Matrices& x, const Copies& copies, const RowScaling& scaling) {
  if (Status s = CheckSize(x); !s.ok()) return s;
  Arguments arguments = ArgumentsOf(x, copies);
  arguments.rows = scaling;
  return LaunchQuantize<Mode<Scales::kRows>>(executor.stream, x, copies.format, arguments, AsTheyAre{});
}

Status QuantizeBlocks(const Executor& executor, const Matrices& x, const Copies& copies, const BlockScaling& scaling) {
  return LaunchQuantizeBlocks(executor.stream, x, copies, scaling, AsTheyAre{});
}

}  // namespace te::quantize
