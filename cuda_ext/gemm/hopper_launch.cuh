// Launching the kernel of one mode and pair of formats, with the tile that hopper_tiles.h chooses.
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <tuple>
#include <utility>

#include "common/cuda_status.h"
#include "common/tma.cuh"
#include "gemm/hopper.h"
#include "gemm/hopper_kernel.cuh"

namespace te::gemm::hopper {

inline CUtensorMapDataType TensorMapType(Type type) {
  switch (type) {
    case Type::kFloat32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case Type::kBFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

// Boxes of `box_rows` rows and 128 bytes of row-major matrices that are so many values apart, or of one where that is
// 0.
inline bool DescribeMatrices(CUtensorMap* map, Type type, const void* data, int64_t rows, int64_t columns,
                             int64_t count, int64_t stride, int box_rows) {
  const int64_t size = SizeOf(type), matrix_stride = stride != 0 ? stride : rows * columns;
  return DescribeBoxes<3>(map, TensorMapType(type), data,
                          {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                           static_cast<cuuint64_t>(stride != 0 ? count : 1)},
                          {static_cast<cuuint64_t>(columns * size), static_cast<cuuint64_t>(matrix_stride * size)},
                          {static_cast<cuuint32_t>(128 / size), static_cast<cuuint32_t>(box_rows), 1},
                          CU_TENSOR_MAP_SWIZZLE_128B);
}

// Boxes of `box` float32 values of one row.
inline bool DescribeRow(CUtensorMap* map, const float* data, int64_t values, int box) {
  return DescribeBoxes<2>(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, data, {static_cast<cuuint64_t>(values), 1},
                          {static_cast<cuuint64_t>((values + 3) / 4 * 16)}, {static_cast<cuuint32_t>(box), 1},
                          CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

// Clusters of two multiprocessors.
inline Status CountClusters(int* count) {
  TE_JAX_TRY(CountMultiprocessors(count));
  *count /= 2;
  return Status::Ok();
}

// Describes the arrays of a batch of products, or of groups, each of which is one of them.
template <typename C>
Status Describe(Arguments& arguments, const Problem& problem) {
  arguments.problem = problem;
  const StridedBatch& batch = problem.batch;
  auto describe = [&](CUtensorMap& map, Type type, const void* data, int64_t rows, int64_t columns, bool rows_last,
                      int64_t stride, int box_lines) {
    if (rows_last) std::swap(rows, columns);
    return DescribeMatrices(&map, type, data, rows, columns, batch.count, stride, box_lines);
  };
  const Operand &a = problem.a, &b = problem.b;
  if (!describe(arguments.a, a.type, a.data, problem.m, problem.k, C::kASummedFirst, batch.a_stride, C::kBoxA) ||
      !describe(arguments.b, b.type, b.data, problem.n, problem.k, C::kBSummedFirst, batch.b_stride, C::kBoxB) ||
      !describe(arguments.d, problem.d_type, problem.d, problem.m, problem.n, false, batch.d_stride, 16)) {
    return Status::Failed("cuTensorMapEncodeTiled refuses the operands");
  }

  if constexpr (C::kMode == Mode::kBlock) {
    const int64_t steps = CeilDiv(problem.k, C::kBK), column_blocks = CeilDiv(problem.n, C::kBN);
    const int64_t row_scales = (batch.count - 1) * batch.a_scales_stride + steps * problem.m;
    const int64_t column_scales = (batch.count - 1) * batch.b_scales_stride + column_blocks * steps;
    const int before = arguments.groups.b_scales_before;
    if (!DescribeRow(&arguments.a_scales, problem.a.scales, row_scales, C::kBoxScalesA) ||
        !DescribeRow(&arguments.b_scales, problem.b.scales - before, before + column_scales, C::kBoxScalesB)) {
      return Status::Failed("cuTensorMapEncodeTiled refuses the scales");
    }
  }
  return Status::Ok();
}

template <typename C>
Status Start(cudaStream_t stream, const ArgumentsOf<C>& arguments, int clusters, int bytes_of_table) {
  constexpr int kBytes = C::kGrouping == Grouping::kNone ? C::kBytes : kSharedBytes;
  TE_JAX_TRY(SetAttributesOnce<Multiply<C>>({{cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes}}));
  Multiply<C><<<2 * clusters, C::kThreads, C::kBytes + bytes_of_table, stream>>>(arguments);
  return Check(cudaGetLastError(), "kernel launch");
}

// Describes the operands of further pairs, which are like the problem's own but for k.
template <typename C>
Status DescribeMore(ArgumentsOf<C>& arguments, const Problem& problem, std::span<const OperandPair> more) {
  if constexpr (C::kPairs > 1) {
    int end = arguments.ends[0] = CeilDiv(problem.k, C::kBK);
    for (int i = 0; i + 1 < C::kPairs; ++i) {
      Problem of_pair = problem;
      of_pair.a = more[i].a, of_pair.b = more[i].b, of_pair.k = more[i].k;
      Arguments described{};
      described.groups.b_scales_before = ScalesBefore(of_pair.b);
      if (Status s = Describe<C>(described, of_pair); !s.ok()) return s;
      arguments.more[i] = {described.a, described.b, described.a_scales, described.b_scales,
                           described.groups.b_scales_before};
      arguments.ends[i + 1] = end += CeilDiv(of_pair.k, C::kBK);
    }
  }
  return Status::Ok();
}

template <typename C>
Status Launch(cudaStream_t stream, const Problem& problem, int clusters, std::span<const OperandPair> more) {
  ArgumentsOf<C> arguments{};
  if constexpr (C::kPairs > 1) arguments.groups.b_scales_before = ScalesBefore(problem.b);
  if (Status s = Describe<C>(arguments, problem); !s.ok()) return s;
  if (Status s = DescribeMore<C>(arguments, problem, more); !s.ok()) return s;
  return Start<C>(stream, arguments, std::min(ClusterTiles<C>(problem), clusters), 0);
}

template <typename... Configs>
Status LaunchCheapest(cudaStream_t stream, const Problem& problem, std::span<const OperandPair> more = {}) {
  constexpr TileCost kCosts[] = {Configs::kCost...};
  constexpr std::array kLaunches = {Launch<Configs>...};
  constexpr int kBK = std::tuple_element_t<0, std::tuple<Configs...>>::kBK;
  int clusters = 0, steps = CeilDiv(problem.k, kBK);
  TE_JAX_TRY(CountClusters(&clusters));
  for (const OperandPair& pair : more) steps += CeilDiv(pair.k, kBK);
  const int best = Cheapest(kCosts, problem.batch.count, problem.m, problem.n, steps, clusters);
  return kLaunches[best](stream, problem, clusters, more);
}

// Three warpgroups with 64 rows each, or two with 128. Where one scale follows all sums and they are promoted, three
// stages are enough; what the fourth would take lets a tile of 16-bit values leave at once.
template <Product kProduct>
using Tile192 = Config<kProduct, TileShape{.groups = 3, .subtiles = 1, .stages = 4, .staged_boxes = 2}>;
template <Product kProduct>
using Tile256 = Config<kProduct, TileShape{.groups = 2,
                                           .subtiles = 2,
                                           .stages = kProduct.mode == Mode::kPromote ? 3 : 4,
                                           .staged_boxes = kProduct.mode == Mode::kPromote ? 4 : 1}>;

// For products that have fewer rows than a large tile, or too few tiles of it for all multiprocessors.
template <Product kProduct>
using Tile64 = Config<kProduct, TileShape{.groups = 1, .subtiles = 1, .stages = 8, .staged_boxes = 2}>;
template <Product kProduct>
using Tile128 = Config<kProduct, TileShape{.groups = 2, .subtiles = 1, .stages = 5, .staged_boxes = 2}>;

template <Product kProduct>
Status RunProduct(cudaStream_t stream, const Problem& problem, std::span<const OperandPair> more = {}) {
  if constexpr (kProduct.mode == Mode::kBlock && kProduct.pairs == 1) {
    return LaunchCheapest<Tile192<kProduct>, Tile256<kProduct>, Tile128<kProduct>, Tile64<kProduct>>(stream, problem);
  } else {
    return LaunchCheapest<Tile192<kProduct>, Tile256<kProduct>>(stream, problem, more);
  }
}

template <Mode kMode, int kPairs = 1>
Status RunFormats(cudaStream_t stream, const Problem& problem, std::span<const OperandPair> more = {}) {
  constexpr auto product = [](Formats formats) { return Product{.formats = formats, .mode = kMode, .pairs = kPairs}; };
  if (problem.a.type == Type::kE5M2) return RunProduct<product(Formats::kE5M2E4M3)>(stream, problem, more);
  if (problem.b.type == Type::kE5M2) return RunProduct<product(Formats::kE4M3E5M2)>(stream, problem, more);
  return RunProduct<product(Formats::kE4M3E4M3)>(stream, problem, more);
}

// One for each mode, in a file of its own: they compile side by side.
Status RunFast(cudaStream_t stream, const Problem& problem);
Status RunPromoted(cudaStream_t stream, const Problem& problem);
Status RunBlock(cudaStream_t stream, const Problem& problem);

// Products with scales of blocks that have few rows (hopper_tiles.h).
Status RunFewRows(cudaStream_t stream, const Problem& problem);

}  // namespace te::gemm::hopper
