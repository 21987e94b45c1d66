// Launches the kernels.
//
// Bytes per bfloat16 value for both copies: 4 in one pass (block and delayed scaling), 6 with a pass for the amax
// before (current and row scaling). On an H200 (4.3 TB/s measured) 8192 × 8192 values cannot take less than 62 and 94
// µs. Arithmetic: 5 to 8 instructions a value, a quarter of that time.
//
// With scales of 1×128 values and no transposed copy, few rows are quantized vector by vector (quantize/rows.cuh), and
// so are rows that TMA could not load or store: threads of a tile would store them byte by byte.
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
#include "quantize/rows.cuh"

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

// Whether x is better quantized in rows than in tiles: where rows do not fill a tile, or TMA could not load and store
// it. Rows must be made of aligned vectors, and be no more than one launch takes.
bool InRows(const Matrices& x, const Copies& copies, const BlockScaling& scaling) {
  if (!copies.data || copies.transposed || copies.column_sums || scaling.data_128x128) return false;
  const int64_t per_vector = x.dtype == DType::kFloat32 ? 4 : 8, rows = x.count * x.rows;
  return (rows < kTile || !ShapeOf(x, {x.data, copies.data}).aligned) && x.cols % per_vector == 0 &&
         OnSixteenBytes(x.data) && rows < INT32_MAX / (1 + x.cols / kTile);
}

template <typename T>
Status LaunchVectors(cudaStream_t stream, const Matrices& x, const RowOutputs& outputs) {
  int multiprocessors = 0;
  TE_JAX_TRY(CountMultiprocessors(&multiprocessors));
  const int64_t rows = x.count * x.rows;
  const RowStrips strips = RowStrips::OfSingleVectors(rows, x.cols / kPer16Bytes<T>, multiprocessors);
  return Check(LaunchAsDependent(QuantizeVectors<T>, static_cast<unsigned>(rows * strips.count),
                                 static_cast<unsigned>(strips.threads), 0, stream, x, outputs,
                                 static_cast<unsigned>(strips.count)),
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
  if (Status s = CheckSize(x); !s.ok()) return s;
  if (InRows(x, copies, scaling)) {
    auto* launch = x.dtype == DType::kFloat32 ? LaunchVectors<float> : LaunchVectors<__nv_bfloat16>;
    return launch(executor.stream, x,
                  {copies.format, copies.power_of_two_scales, copies.data, nullptr, scaling.scale_inv, nullptr});
  }
  return LaunchQuantizeBlocks(executor.stream, x, copies, scaling, AsTheyAre{});
}

}  // namespace te::quantize
