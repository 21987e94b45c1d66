// On Hopper's tensor cores: a persistent grid whose thread blocks take tiles of 128 × 128 of the lower triangle, each
// of which is stored twice. One warp feeds tiles of a and b to shared memory through TMA, in steps of 64 along k.
//
// Two warpgroups have a tile each, by turns: while one has the tensor cores, the other one writes its results. A
// parity does not tell a phase from the next but one, so a warpgroup may wait for its first stage only when the other
// has seen its last: that is its turn (`order`).
//
// FLOPs m²k for a product, of tiles on the diagonal twice as many: half of those of a product that knows nothing of
// symmetry. Bytes 2 (2mk + m²) once each, as long as concurrent tiles share their rows in L2: tiles follow each other
// in bands of eight rows of tiles, column by column. On an H200 0.58 to 0.65 of cuBLASLt's time with 4096 rows or more
// (docs/measurements.md). A grid's last round is as long as a full one, so that few tiles gain nothing.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "common/cuda_status.h"
#include "common/tma.cuh"
#include "gemm/hopper_launch.cuh"
#include "symmetric_gemm/symmetric_gemm.h"

namespace te::symmetric_gemm {
namespace {

using namespace gemm::hopper;

inline constexpr int kBox = 64, kBoxBytes = kBox * 128;  // 64 × 64 values
inline constexpr int kStages = 6, kBand = 8;
inline constexpr int kGroups = 2, kThreads = 128 * (kGroups + 1);

struct Shared {
  uint8_t operands[kStages][2][2][kBoxBytes];  // two boxes of a, and of b
  uint8_t staging[kGroups][2][kBoxBytes];      // of a warpgroup: a box of d, and its mirror
  uint64_t full[kStages], empty[kStages], order[kGroups];
};
static_assert(sizeof(Shared) <= kSharedBytes);

struct Arguments {
  CUtensorMap a, b, d;
  Problem problem;
  int tiles;  // of 128 rows
  int units;  // tiles of the lower triangle
  int steps;  // of 64 along k
};

struct LowerTile {
  int product, row, column;  // of d, in values
};

// The tile of the lower triangle that comes so many places after the first.
__device__ __forceinline__ LowerTile TileAt(const Arguments& args, int unit) {
  const int product = unit / args.units;
  int at = unit - product * args.units, first = 0, rows = 0;
  for (;; first += kBand) {  // bands of rows
    rows = min(kBand, args.tiles - first);
    const int in_band = rows * first + rows * (rows + 1) / 2;
    if (at < in_band) break;
    at -= in_band;
  }
  int column = at / rows, row = at % rows;
  if (at >= rows * first) {  // columns that reach the diagonal
    column = first, row = at - rows * first;
    for (; row >= rows - (column - first); ++column) row -= rows - (column - first);
    row += column - first;
  }
  return {product, (first + row) * static_cast<int>(kTile), column * static_cast<int>(kTile)};
}

template <typename T>
struct Pairs;
template <>
struct Pairs<__half> {
  static constexpr Formats kFormats = Formats::kFloat16;
  using Pair = __half2;
  static __device__ __forceinline__ Pair Of(float x, float y) { return __floats2half2_rn(x, y); }
  static __device__ __forceinline__ float2 Floats(Pair x) { return __half22float2(x); }
};
template <>
struct Pairs<__nv_bfloat16> {
  static constexpr Formats kFormats = Formats::kBFloat16;
  using Pair = __nv_bfloat162;
  static __device__ __forceinline__ Pair Of(float x, float y) { return __floats2bfloat162_rn(x, y); }
  static __device__ __forceinline__ float2 Floats(Pair x) { return __bfloat1622float2(x); }
};

// Until the 128 threads of a warpgroup are here.
__device__ __forceinline__ void SyncGroup(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

__device__ __forceinline__ void StoreMatricesTransposed(uint32_t to, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// 16-bit values of a box at a row and a column, as TMA swizzles them.
__device__ __forceinline__ uint32_t Swizzled(uint32_t box, int row, int column) {
  return box + row * 128 + ((column / 8) ^ (row & 7)) * 16 + column % 8 * 2;
}

__device__ __forceinline__ void StoreShort(uint32_t to, uint32_t bits) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(static_cast<uint16_t>(bits)) : "memory");
}

// Stores a warpgroup's 128 × 128 sums, and their mirror, a box of 64 × 64 after the other.
template <typename T>
__device__ __forceinline__ void Store(const Arguments& args, float (&total)[2][64], const LowerTile& tile,
                                      uint32_t staging, int group) {
  using P = Pairs<T>;
  using Pair = typename P::Pair;
  const Problem& p = args.problem;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, m = static_cast<int>(p.m);
  const bool is_first = threadIdx.x % 128 == 0, is_diagonal = tile.row == tile.column;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (s == 0 && h == 1 && is_diagonal) continue;  // above it
      const bool is_masked = is_diagonal && s == h;
      const int row = tile.row + s * kBox, column = tile.column + h * kBox;
      const float* const x = total[s] + 32 * h;
      uint32_t packed[16];  // [8 columns apart][8 rows apart]: two columns of a row
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int r = warp * 16 + i % 2 * 8 + lane / 4, q = i / 2 * 8 + lane % 4 * 2;
        float y[2] = {p.alpha * x[2 * i], p.alpha * x[2 * i + 1]};
        if (p.c != nullptr) {
          const auto* const c = static_cast<const T*>(p.c) + (int64_t{tile.product} * m + row + r) * m + column + q;
          const float2 old = P::Floats(*reinterpret_cast<const Pair*>(c));
          y[0] = fmaf(p.beta, old.x, y[0]), y[1] = fmaf(p.beta, old.y, y[1]);
        }
        if (is_masked) y[0] += r == q ? p.diagonal : 0.0f, y[1] += r == q + 1 ? p.diagonal : 0.0f;
        const Pair pair = P::Of(y[0], y[1]);
        packed[i] = reinterpret_cast<const uint32_t&>(pair);
      }
      if (is_first) BulkWaitRead();
      SyncGroup(group);
      if (is_masked) {
        // In a box on the diagonal of d, values above the diagonal are copies of those below it.
#pragma unroll
        for (int i = 0; i < 16; ++i) {
#pragma unroll
          for (int l = 0; l < 2; ++l) {
            const int r = warp * 16 + i % 2 * 8 + lane / 4, q = i / 2 * 8 + lane % 4 * 2 + l;
            if (r < q) continue;
            StoreShort(Swizzled(staging, r, q), packed[i] >> (16 * l));
            StoreShort(Swizzled(staging, q, r), packed[i] >> (16 * l));
          }
        }
      } else {
        const uint32_t at = staging + (warp * 16 + lane % 16) * 128, chunk = lane / 16, swizzle = lane & 7;
        const uint32_t mirror =
            staging + kBoxBytes + (lane / 16 * 8 + lane % 8) * 128 + ((warp * 2 + lane / 8 % 2) ^ swizzle) * 16;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          const uint32_t of_j[4] = {packed[2 * j], packed[2 * j + 1], packed[2 * j + 2], packed[2 * j + 3]};
          StoreMatrices(at + ((j + chunk) ^ swizzle) * 16, of_j[0], of_j[1], of_j[2], of_j[3]);
          StoreMatricesTransposed(mirror + j * 8 * 128, of_j);
        }
      }
      AsyncProxyFence();
      SyncGroup(group);
      if (is_first) {
        StoreBox(&args.d, column, row, tile.product, staging);
        if (!is_masked) StoreBox(&args.d, row, column, tile.product, staging + kBoxBytes);
        BulkCommit();
      }
    }
  }
}

// Loads the tiles of all units, in their order.
template <bool kSummedFirst>
__device__ __forceinline__ void Feed(const Arguments& args, Shared& shared, int all_units) {
  uint32_t stage = 0, parity = 0;
  for (int unit = blockIdx.x; unit < all_units; unit += gridDim.x) {
    const LowerTile tile = TileAt(args, unit);
    for (int step = 0; step < args.steps; ++step) {
      const uint32_t full = SharedAddress(&shared.full[stage]);
      BarrierWait(SharedAddress(&shared.empty[stage]), parity ^ 1);
      BarrierExpect(full, sizeof(shared.operands[0]));
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        auto load = [&](int operand, const CUtensorMap* map, int first) {
          const int at = first + box * kBox, k = step * kBox;
          LoadBox(SharedAddress(shared.operands[stage][operand][box]), map, kSummedFirst ? at : k,
                  kSummedFirst ? k : at, tile.product, full);
        };
        load(0, &args.a, tile.row);
        load(1, &args.b, tile.column);
      }
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  }
}

// Every second unit of a thread block.
template <typename T, bool kSummedFirst>
__device__ __forceinline__ void Multiply(const Arguments& args, Shared& shared, int group, int all_units) {
  const int lane = threadIdx.x % 32, steps = args.steps;
  const uint32_t staging = SharedAddress(shared.staging[group]);
  const uint32_t first_a = __shfl_sync(~0u, TileAddress(SharedAddress(shared.operands[0][0])), 0);
  constexpr uint32_t kOperand = 2 * kBoxBytes >> 4, kStage = 2 * kOperand;
  uint32_t stage = 0, parity = 0, turn = group ^ 1;  // the first turn of the first warpgroup is at once
  auto release = [&](uint32_t of_stage) {
    if (lane == 0) BarrierArriveHere(SharedAddress(&shared.empty[of_stage]));
  };
  auto skip_other = [&] {  // its stages
    const uint32_t to = stage + steps, rounds = to / kStages;
    stage = to - rounds * kStages;
    parity ^= rounds & 1;
  };
  const int stride = gridDim.x;
  int unit = blockIdx.x;
  if (group == 1) unit += stride, skip_other();
  for (; unit < all_units; unit += 2 * stride) {
    float total[2][64];
    BarrierWait(SharedAddress(&shared.order[group]), turn);
    turn ^= 1;
    for (int step = 0; step < steps; ++step) {
      BarrierWait(SharedAddress(&shared.full[stage]), parity);
      Pin(total[0]), Pin(total[1]);
      WgmmaFence();
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const uint32_t a = first_a + stage * kStage + s * (kBoxBytes >> 4), b = first_a + stage * kStage + kOperand;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          constexpr uint32_t kNext = kSummedFirst ? kBoxBytes / 4 >> 4 : 2;
          uint64_t of_a = TileDescriptor(a + k * kNext), of_b = TileDescriptor(b + k * kNext);
          if constexpr (kSummedFirst) of_a = SummedFirst(of_a), of_b = SummedFirst(of_b);
          Wgmma<Pairs<T>::kFormats, kSummedFirst, kSummedFirst>(total[s], of_a, of_b, step > 0 || k > 0);
        }
      }
      WgmmaCommit();
      Pin(total[0]), Pin(total[1]);
      WgmmaWait<1>();
      if (step > 0) release(stage == 0 ? kStages - 1 : stage - 1);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    if (lane == 0) BarrierArriveHere(SharedAddress(&shared.order[group ^ 1]));
    __syncwarp();
    WgmmaWait<0>();
    release(stage == 0 ? kStages - 1 : stage - 1);
    Pin(total[0]), Pin(total[1]);
    skip_other();
    Store<T>(args, total, TileAt(args, unit), staging, group);
  }
  if (threadIdx.x % 128 == 0) BulkWaitRead();
}

template <typename T, bool kSummedFirst>
__global__ void __launch_bounds__(kThreads, 1) MultiplyLowerTiles(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const int all_units = static_cast<int>(args.problem.count) * args.units;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(SharedAddress(&shared.full[i]), 1);
      BarrierInit(SharedAddress(&shared.empty[i]), 4);  // warps
    }
    for (int i = 0; i < kGroups; ++i) BarrierInit(SharedAddress(&shared.order[i]), 4);
    BarrierInitFence();
  }
  __syncthreads();
  if (const int group = __shfl_sync(~0u, threadIdx.x / 128, 0); group < kGroups) {
    AllocateRegisters<232>();
    Multiply<T, kSummedFirst>(args, shared, group, all_units);
  } else {
    DeallocateRegisters<40>();
    if (threadIdx.x % 128 == 0) Feed<kSummedFirst>(args, shared, all_units);
  }
}

template <typename T, bool kSummedFirst>
Status Launch(cudaStream_t stream, const Arguments& args) {
  constexpr auto* kKernel = MultiplyLowerTiles<T, kSummedFirst>;
  TE_JAX_TRY(SetAttributesOnce<kKernel>({{cudaFuncAttributeMaxDynamicSharedMemorySize, int{sizeof(Shared)}}}));
  int multiprocessors = 0;
  TE_JAX_TRY(CountMultiprocessors(&multiprocessors));
  const auto blocks = std::min<int64_t>(args.problem.count * args.units, multiprocessors);
  kKernel<<<static_cast<unsigned>(blocks), kThreads, sizeof(Shared), stream>>>(args);
  return Check(cudaGetLastError(), "kernel launch");
}

}  // namespace

Status Run(const Executor& executor, const Problem& p) {
  const int64_t tiles = p.m / kTile;
  if (p.m % kTile != 0 || p.k % 8 != 0) {
    return Status::Failed("m is " + std::to_string(p.m) + " and k " + std::to_string(p.k) +
                          "; they must be multiples of 128 and of 8");
  }
  if (p.count * tiles * (tiles + 1) / 2 > INT32_MAX / 4) return Status::Failed("there are too many tiles");
  Arguments args{.problem = p, .tiles = static_cast<int>(tiles), .units = static_cast<int>(tiles * (tiles + 1) / 2)};
  args.steps = static_cast<int>((p.k + kBox - 1) / kBox);
  // TMA copies bits: both types are the same to it.
  auto describe = [&](CUtensorMap& map, const void* array, int64_t rows, int64_t columns) {
    return DescribeMatrices(&map, gemm::Type::kBFloat16, array, rows, columns, p.count, rows * columns, kBox);
  };
  const int64_t rows = p.summed_first ? p.k : p.m, columns = p.summed_first ? p.m : p.k;
  if (!describe(args.a, p.a, rows, columns) || !describe(args.b, p.b, rows, columns) ||
      !describe(args.d, p.d, p.m, p.m)) {
    return Status::Failed("cuTensorMapEncodeTiled refuses the operands");
  }
  auto launch = [&]<typename T>() {
    return p.summed_first ? Launch<T, true>(executor.stream, args) : Launch<T, false>(executor.stream, args);
  };
  return p.type == gemm::Type::kFloat16 ? launch.template operator()<__half>()
                                        : launch.template operator()<__nv_bfloat16>();
}

}  // namespace te::symmetric_gemm
