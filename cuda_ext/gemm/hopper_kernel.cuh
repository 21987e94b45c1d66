// The kernel: a persistent grid of clusters of two blocks. In a block one warp feeds tiles to shared memory through the
// copy engine, and two or three warpgroups multiply them.
//
// A block computes kBM × kBN of d, some subtiles of 64 rows in each warpgroup, in steps of 128 along k. The two blocks
// of a cluster lie side by side and need the same rows of a: each loads half of these and sends it to both. Otherwise a
// step of 256 × 128 × 128 would need 48 KB, 9 TB/s at full rate, and the L2 cache yields about 6.
//
// Sums in the tensor cores keep about 14 bits. Modes other than kFast start a new sum in `partial` every 128 values of
// k, and add it, scaled, to `total` in float32. While one warpgroup adds, the others keep the tensor cores busy, as
// long as everything between two products of a warpgroup takes less time than those of the others: the code from
// `WgmmaWait` to the next `Wgmma` is what counts. Each warp copies the scales of its rows itself, some steps ahead.
//
// FLOPs 2mnk; bytes mk + nk + mn · size of d, once each, as long as the tiles of concurrent blocks share their rows in
// L2: blocks walk the result in bands of kBand cluster tiles. The floor is that of the tensor cores, 4096 products a
// cycle and multiprocessor.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gemm/hopper.h"
#include "gemm/hopper_ptx.cuh"
#include "gemm/hopper_wgmma.cuh"

namespace te::gemm::hopper {

enum class Mode { kFast, kPromote, kBlock };

struct Arguments {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap d;
  Problem problem;
};

template <Formats kFormats_, Mode kMode_, int kGroups_, int kSubtiles_, int kStages_, int kStagedBoxes_>
struct Config {
  static constexpr Formats kFormats = kFormats_;
  static constexpr Mode kMode = kMode_;
  static constexpr int kGroups = kGroups_;      // warpgroups that multiply
  static constexpr int kSubtiles = kSubtiles_;  // of 64 rows, for each of them
  static constexpr int kBM = 64 * kGroups * kSubtiles, kBN = 128, kBK = 128;
  static constexpr int kStages = kStages_;
  static constexpr int kStagedBoxes = kStagedBoxes_;  // of 16 rows and 128 bytes of d, for each warp
  static constexpr int kBand = 8;
  static constexpr int kMathWarps = 4 * kGroups;
  static constexpr int kThreads = 128 + 32 * kMathWarps;
  static constexpr int kMathRegisters = kGroups == 2 ? 232 : 160, kFeedRegisters = kGroups == 2 ? 40 : 32;

  // Shared memory, in order; tiles and boxes must lie on 1024 bytes.
  static constexpr int kBytesA = kBM * kBK, kBytesB = kBN * kBK, kBytesBox = 16 * 128;
  static constexpr int kBytesStaging = kMathWarps * kStagedBoxes * kBytesBox;
  static constexpr int kBytesZeros = kMode == Mode::kFast ? 0 : 1024;
  // For each warp: of the steps under way, the scales of its rows, and eight times that of all columns, one behind each
  // row of those that a thread has first.
  static constexpr int kScaleSlots = 4, kScaledRows = 16 * kSubtiles, kBytesSlot = 4 * (kScaledRows + 8);
  static constexpr int kBytesScales = kMode == Mode::kBlock ? kMathWarps * kScaleSlots * kBytesSlot : 0;
  static constexpr int kBytes = 1024 + kStages * (kBytesA + kBytesB) + kBytesStaging + kBytesZeros + kBytesScales +
                                2 * kStages * static_cast<int>(sizeof(uint64_t));
  static_assert(kBytes <= 227 * 1024);

  // Rows and columns of a cluster's tile, and rows of what is loaded at once.
  static constexpr int kClusterM = kBM, kClusterN = 2 * kBN;
  static constexpr int kBoxA = kBM / 2, kBoxB = kBN;

  // Measured on an H200 (docs/measurements.md). The tensor cores alone would take 4 cycles for each row of a step. With
  // scales of blocks three warpgroups take 4.7 and two 5.0, but two need less energy: they count the same.
  static constexpr double kStepCycles = kBM * (kMode == Mode::kFast      ? (kGroups == 3 ? 4.10 : 4.04)
                                               : kMode == Mode::kPromote ? (kGroups == 3 ? 4.12 : 4.32)
                                                                         : 4.85);
  static constexpr double kTileCycles = kBM * (kMode == Mode::kBlock ? 9.0 : 14.5);
};

__host__ __device__ constexpr int CeilDiv(int64_t a, int b) { return static_cast<int>((a + b - 1) / b); }

// Where the tiles of a block lie, in the order in which it computes them. It remembers one number: registers are dear.
template <typename C>
class Tiles {
 public:
  __device__ Tiles() : next_(blockIdx.x / 2) {}

  __device__ __forceinline__ bool Next(const Problem& p, int* m, int* n) {
    const int rows = CeilDiv(p.m, C::kClusterM), columns = CeilDiv(p.n, C::kClusterN);
    if (next_ >= rows * columns) return false;
    const int rank = ClusterRank();
    const int band = next_ / (C::kBand * columns);
    const int rows_of_band = min(C::kBand, rows - band * C::kBand);
    const int within = next_ - band * C::kBand * columns;
    *m = (band * C::kBand + within % rows_of_band) * C::kClusterM;
    *n = within / rows_of_band * C::kClusterN + rank * C::kBN;
    next_ += gridDim.x / 2;
    return true;
  }

 private:
  int next_;
};

// A place in the ring of stages, and the parity of its round.
template <int kStages>
struct Ring {
  uint32_t stage = 0, parity = 0;
  __device__ void Advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <typename T>
struct Pair;
template <>
struct Pair<float> {
  using Type = float2;
  static __device__ float2 Pack(float x, float y) { return {x, y}; }
  static __device__ float2 Unpack(float2 pair) { return pair; }
};
template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  static __device__ __nv_bfloat162 Pack(float x, float y) { return __floats2bfloat162_rn(x, y); }
  static __device__ float2 Unpack(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
};
template <>
struct Pair<__half> {
  using Type = __half2;
  static __device__ __half2 Pack(float x, float y) { return __floats2half2_rn(x, y); }
  static __device__ float2 Unpack(__half2 pair) { return __half22float2(pair); }
};

// The sums of one warp, and what is done with them after the last step. Of every 64 × 8 values of a warpgroup, a thread
// holds two neighbours in a row, lane / 4 of its warp's sixteen, and two in the row eight below.
//
// Each part is a loop of its own behind a uniform branch: this code runs once a tile, so it costs what must be fetched
// of it rather than what it computes. The way out is the copy engine's: it writes, or adds, boxes of 16 rows and 128
// bytes from shared memory while the next tile is under way, and leaves out what lies outside d.
template <typename C>
class Epilogue {
 public:
  __device__ Epilogue(const Arguments& arguments, float (&total)[C::kSubtiles][C::kBN / 2], int m0, int n0,
                      uint32_t staging)
      : arguments_(arguments),
        p_(arguments.problem),
        total_(total),
        lane_(threadIdx.x % 32),
        row_(m0 + threadIdx.x / 32 % 4 * 16),
        column_(n0),
        staging_(staging),
        rows_left_(static_cast<int>(p_.m) - row_),
        columns_left_(static_cast<int>(p_.n) - n0) {}

  __device__ __forceinline__ void Run() {
    if constexpr (C::kMode != Mode::kBlock) {  // there the sums are scaled already
      if (p_.scaling == Scaling::kRow) {
        ScaleRowsAndColumns();
      } else {
        Scale(__ldg(p_.a_scale_inv) * __ldg(p_.b_scale_inv));
      }
    }
    switch (p_.d_type) {
      case DType::kFloat32:
        Finish<float>();
        break;
      case DType::kBFloat16:
        Finish<__nv_bfloat16>();
        break;
      case DType::kFloat16:
        Finish<__half>();
        break;
    }
  }

 private:
  static constexpr int kEights = C::kBN / 8;

  __device__ __forceinline__ void Scale(float scale) {
#pragma unroll
    for (int s = 0; s < C::kSubtiles; ++s) {
#pragma unroll
      for (int i = 0; i < C::kBN / 2; ++i) total_[s][i] *= scale;
    }
  }

  __device__ __forceinline__ void ScaleRowsAndColumns() {
    float row_scale[C::kSubtiles][2];
#pragma unroll
    for (int s = 0; s < C::kSubtiles; ++s) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const int row = s * 64 + below * 8 + lane_ / 4;
        row_scale[s][below] = row < rows_left_ ? __ldg(p_.a_scale_inv + row_ + row) : 0.0f;
      }
    }
    const float* const scales = p_.b_scale_inv + column_ + lane_ % 4 * 2;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const float2 scale = j * 8 < columns_left_ ? __ldg(reinterpret_cast<const float2*>(scales + j * 8)) : float2{};
#pragma unroll
      for (int s = 0; s < C::kSubtiles; ++s) {
        total_[s][4 * j] *= row_scale[s][0] * scale.x;
        total_[s][4 * j + 1] *= row_scale[s][0] * scale.y;
        total_[s][4 * j + 2] *= row_scale[s][1] * scale.x;
        total_[s][4 * j + 3] *= row_scale[s][1] * scale.y;
      }
    }
  }

  template <typename T>
  __device__ __forceinline__ void Finish() {
    if (p_.bias != nullptr) AddBias<T>();
    // The copy engine adds float32 itself; sums of 16-bit values are rounded once, here.
    if (sizeof(T) == 2 && p_.accumulate) Accumulate<T>();
    Write<T>();
  }

  template <typename T>
  __device__ __forceinline__ void AddBias() {
    const T* const bias = static_cast<const T*>(p_.bias) + column_ + lane_ % 4 * 2;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const float2 b = j * 8 < columns_left_
                           ? Pair<T>::Unpack(*reinterpret_cast<const typename Pair<T>::Type*>(bias + j * 8))
                           : float2{};
#pragma unroll
      for (int s = 0; s < C::kSubtiles; ++s) {
        total_[s][4 * j] += b.x;
        total_[s][4 * j + 1] += b.y;
        total_[s][4 * j + 2] += b.x;
        total_[s][4 * j + 3] += b.y;
      }
    }
  }

  template <typename T>
  __device__ __forceinline__ void Accumulate() {
    using P = typename Pair<T>::Type;
#pragma unroll
    for (int s = 0; s < C::kSubtiles; ++s) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const int row = s * 64 + below * 8 + lane_ / 4;
        const int columns = row < rows_left_ ? columns_left_ : 0;
        const T* const from =
            static_cast<const T*>(p_.d) + static_cast<int64_t>(row_ + row) * p_.n + column_ + lane_ % 4 * 2;
        P old[kEights];
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          if (j * 8 < columns) old[j] = *reinterpret_cast<const P*>(from + j * 8);
        }
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          const float2 value = Pair<T>::Unpack(old[j]);
          total_[s][4 * j + 2 * below] += value.x;
          total_[s][4 * j + 2 * below + 1] += value.y;
        }
      }
    }
  }

  template <typename T>
  __device__ __forceinline__ void Write() {
    constexpr int kBoxColumns = 128 / sizeof(T);
    constexpr int kBoxes = C::kBN / kBoxColumns;  // in each subtile
    static_assert(C::kSubtiles * kBoxes % C::kStagedBoxes == 0);
#pragma unroll
    for (int first = 0; first < C::kSubtiles * kBoxes; first += C::kStagedBoxes) {
      if (lane_ == 0) BulkWaitRead();  // what was sent before this has left shared memory
      __syncwarp();
#pragma unroll
      for (int i = 0; i < C::kStagedBoxes; ++i) {
        const int subtile = (first + i) / kBoxes, box = (first + i) % kBoxes;
        Stage<T>(total_[subtile] + box * kBoxColumns / 2, staging_ + i * C::kBytesBox);
      }
      AsyncProxyFence();
      __syncwarp();
      if (lane_ == 0) {
#pragma unroll
        for (int i = 0; i < C::kStagedBoxes; ++i) {
          const int subtile = (first + i) / kBoxes, box = (first + i) % kBoxes;
          const int column = column_ + box * kBoxColumns, row = row_ + subtile * 64;
          if (sizeof(T) == 4 && p_.accumulate) {
            AddBox(&arguments_.d, column, row, staging_ + i * C::kBytesBox);
          } else {
            StoreBox(&arguments_.d, column, row, staging_ + i * C::kBytesBox);
          }
        }
        BulkCommit();
      }
    }
  }

  // Packs 16 rows of 128 bytes. A row's eight chunks of 16 bytes are permuted by its number, as the copy engine expects
  // it, and so that what is written at once never meets in a bank.
  template <typename T>
  __device__ __forceinline__ void Stage(const float* values, uint32_t box) {
    if constexpr (sizeof(T) == 4) {
      const uint32_t at = box + lane_ / 4 * 128 + lane_ % 2 * 8, swizzle = lane_ / 4, chunk = lane_ % 4 / 2;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t to = at + ((2 * j + chunk) ^ swizzle) * 16;
        StoreShared(to, values[4 * j], values[4 * j + 1]);
        StoreShared(to + 8 * 128, values[4 * j + 2], values[4 * j + 3]);
      }
    } else {
      const uint32_t at = box + lane_ % 16 * 128, swizzle = lane_ & 7, chunk = lane_ / 16;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const typename Pair<T>::Type pair = Pair<T>::Pack(values[4 * j + 2 * i], values[4 * j + 2 * i + 1]);
          packed[i] = reinterpret_cast<const uint32_t&>(pair);
        }
        StoreMatrices(at + ((j + chunk) ^ swizzle) * 16, packed[0], packed[1], packed[2], packed[3]);
      }
    }
  }

  const Arguments& arguments_;
  const Problem& p_;
  float (&total_)[C::kSubtiles][C::kBN / 2];
  const int lane_;
  const int row_, column_;  // of d, where the warp's first subtile begins
  const uint32_t staging_;
  const int rows_left_, columns_left_;
};

// Sets sums to zero by a product of zeros, which settles where they lie: the sums of a product start at an even
// register, and each of these changes places with its neighbour. So a sum never lies in the same of two register banks
// as the result that is added to it; where it does, adding takes longer, and the compiler leaves that to chance.
template <typename C>
__device__ __forceinline__ void ClearOutOfStep(float (&sums)[C::kBN / 2], uint64_t zeros) {
  float swapped[C::kBN / 2] = {};
  Pin(swapped);
  WgmmaFence();
  Wgmma<C::kFormats, C::kBN>(swapped, zeros, zeros, false);
  WgmmaCommit();
  Pin(swapped);
  WgmmaWait<0>();
#pragma unroll
  for (int i = 0; i < C::kBN / 2; ++i) sums[i] = swapped[i ^ 1];
}

template <typename C>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(C::kThreads, 1)
    Multiply(const __grid_constant__ Arguments arguments) {
  extern __shared__ uint8_t shared[];
  const Problem& p = arguments.problem;
  const uint32_t rank = ClusterRank();
  const int steps = CeilDiv(p.k, C::kBK);

  const uint32_t tiles_a = (SharedAddress(shared) + 1023) & ~1023u;
  const uint32_t tiles_b = tiles_a + C::kStages * C::kBytesA;
  const uint32_t staging = tiles_b + C::kStages * C::kBytesB;
  const uint32_t zeros = staging + C::kBytesStaging;
  const uint32_t scales = zeros + C::kBytesZeros;
  const uint32_t full = scales + C::kBytesScales;
  const uint32_t empty = full + 8 * C::kStages;

  if (threadIdx.x == 0) {
    PrefetchTensorMap(&arguments.a);
    PrefetchTensorMap(&arguments.b);
    PrefetchTensorMap(&arguments.d);
    for (int i = 0; i < C::kStages; ++i) {
      BarrierInit(full + 8 * i, 1);
      BarrierInit(empty + 8 * i, 2 * C::kMathWarps);  // the warps of both blocks read what either one sent
    }
    BarrierInitFence();
  }
  if constexpr (C::kBytesZeros > 0) {
    if (threadIdx.x < C::kBytesZeros / 8) StoreShared(zeros + 8 * threadIdx.x, 0.0f, 0.0f);
    AsyncProxyFence();
  }
  ClusterSync();

  Tiles<C> tiles;
  Ring<C::kStages> ring;
  int m0, n0;
  if (threadIdx.x >= 32 * C::kMathWarps) {
    GiveRegisters<C::kFeedRegisters>();
    if (threadIdx.x == 32 * C::kMathWarps) {
      while (tiles.Next(p, &m0, &n0)) {
        for (int step = 0; step < steps; ++step, ring.Advance()) {
          const uint32_t barrier = full + 8 * ring.stage;
          const uint32_t to_a = tiles_a + ring.stage * C::kBytesA, to_b = tiles_b + ring.stage * C::kBytesB;
          BarrierWait(empty + 8 * ring.stage, ring.parity ^ 1);
          BarrierExpect(barrier, C::kBytesA + C::kBytesB);
          const int half = rank * C::kBoxA;
          LoadBoxMulticast(to_a + half * C::kBK, &arguments.a, step * C::kBK, m0 + half, barrier, 3);
          LoadBox(to_b, &arguments.b, step * C::kBK, n0, barrier);
        }
      }
    }
  } else {
    TakeRegisters<C::kMathRegisters>();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32;
    const int lane = static_cast<int>(Kept(threadIdx.x % 32));
    const int group_row = group * (64 * C::kSubtiles);
    const uint32_t warp_staging = staging + warp * C::kStagedBoxes * C::kBytesBox;
    // Two lanes tell the two blocks that the warp is done with a stage.
    const uint32_t empty_of_lane = Kept(lane < 2 ? PeerAddress(empty, lane) : 0);
    auto release = [&](uint32_t stage) {
      if (empty_of_lane != 0) BarrierArrive(empty_of_lane + 8 * stage);
    };
    // The same in all lanes, which the compiler does not see.
    const uint32_t first_a = __shfl_sync(~0u, TileAddress(tiles_a + group_row * C::kBK), 0);
    const uint32_t first_b = __shfl_sync(~0u, TileAddress(tiles_b), 0);
    // Products of 64 rows of a stage, from row `row` of the warpgroup's, into d.
    auto multiply = [&](float (&d)[C::kBN / 2], int row, bool add) {
      const uint32_t a = first_a + ring.stage * (C::kBytesA >> 4) + row * (C::kBK >> 4);
      const uint32_t b = first_b + ring.stage * (C::kBytesB >> 4);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Wgmma<C::kFormats, C::kBN>(d, TileDescriptor(a + 2 * k), TileDescriptor(b + 2 * k), add || k > 0);
      }
    };

    // The scales of a step, three steps ahead: a warp's lanes copy one row's each.
    const uint32_t warp_scales = scales + warp * (C::kScaleSlots * C::kBytesSlot);
    const uint32_t scales_of_rows = Kept(warp_scales + 4 * (lane / 4)), scales_of_lane = Kept(warp_scales + 4 * lane);
    const float *next_a = nullptr, *next_b = nullptr;
    auto ask = [&](int step) {
      const uint32_t to = scales_of_lane + step % C::kScaleSlots * C::kBytesSlot;
      CopyAsync(to, next_a, step < steps && lane < C::kScaledRows);
      CopyAsync(to + 4 * C::kScaledRows, next_b, step < steps && lane < 8);
      CopyCommit();
      next_a += p.m;
      ++next_b;
    };
    auto ask_for_first = [&] {
      const int row = m0 + group_row + lane / 16 * 64 + warp % 4 * 16 + lane % 16;
      next_a = p.a_scale_inv + min(row, static_cast<int>(p.m) - 1);
      next_b = p.b_scale_inv + static_cast<int64_t>(min(n0 / 128, CeilDiv(p.n, 128) - 1)) * steps;
      __syncwarp();  // what was there has been read
      for (int step = 0; step < C::kScaleSlots - 1; ++step) ask(step);
    };

    bool more = tiles.Next(p, &m0, &n0);
    if (C::kMode == Mode::kBlock && more) ask_for_first();
    while (more) {
      float total[C::kSubtiles][C::kBN / 2];
      if constexpr (C::kMode == Mode::kFast) {
        for (int step = 0; step < steps; ++step, ring.Advance()) {
          BarrierWait(full + 8 * ring.stage, ring.parity);
#pragma unroll
          for (int s = 0; s < C::kSubtiles; ++s) Pin(total[s]);
          WgmmaFence();
#pragma unroll
          for (int s = 0; s < C::kSubtiles; ++s) multiply(total[s], s * 64, step > 0);
          WgmmaCommit();
#pragma unroll
          for (int s = 0; s < C::kSubtiles; ++s) Pin(total[s]);
          WgmmaWait<1>();  // the step before this one
          if (step > 0) release(ring.stage == 0 ? C::kStages - 1 : ring.stage - 1);
        }
        WgmmaWait<0>();
        release(ring.stage == 0 ? C::kStages - 1 : ring.stage - 1);
#pragma unroll
        for (int s = 0; s < C::kSubtiles; ++s) Pin(total[s]);
      } else {
        static_assert(C::kMode != Mode::kBlock || C::kBN == 128);
#pragma unroll
        for (int s = 0; s < C::kSubtiles; ++s) ClearOutOfStep<C>(total[s], TileDescriptor(TileAddress(zeros), 0));
        for (int step = 0; step < steps; ++step, ring.Advance()) {
          if constexpr (C::kMode == Mode::kBlock) {
            CopyWait<C::kScaleSlots - 2>();
            __syncwarp();
          }
          BarrierWait(full + 8 * ring.stage, ring.parity);
          const uint32_t slot = scales_of_rows + step % C::kScaleSlots * C::kBytesSlot;
          float partial[C::kBN / 2];
#pragma unroll
          for (int s = 0; s < C::kSubtiles; ++s) {
            Pin(partial);
            WgmmaFence();
            multiply(partial, s * 64, false);
            WgmmaCommit();
            Pin(partial);
            float scale[2] = {};
            if constexpr (C::kMode == Mode::kBlock) {
              const float scale_b = LoadShared(slot + 4 * C::kScaledRows);
              scale[0] = scale_b * LoadShared(slot + 4 * (s * 16));
              scale[1] = scale_b * LoadShared(slot + 4 * (s * 16 + 8));
            }
            WgmmaWait<0>();
            if (s == C::kSubtiles - 1) release(ring.stage);
            if (C::kMode == Mode::kBlock && s == 0) ask(step + C::kScaleSlots - 1);
#pragma unroll
            for (int i = 0; i < C::kBN / 8; ++i) {
              if constexpr (C::kMode == Mode::kBlock) {
                total[s][4 * i] += scale[0] * partial[4 * i];
                total[s][4 * i + 1] += scale[0] * partial[4 * i + 1];
                total[s][4 * i + 2] += scale[1] * partial[4 * i + 2];
                total[s][4 * i + 3] += scale[1] * partial[4 * i + 3];
              } else {
#pragma unroll
                for (int j = 0; j < 4; ++j) total[s][4 * i + j] += partial[4 * i + j];
              }
            }
          }
        }
      }

      const int row = m0 + group_row, column = n0;
      more = tiles.Next(p, &m0, &n0);
      if (C::kMode == Mode::kBlock && more) ask_for_first();
      Epilogue<C>(arguments, total, row, column, warp_staging).Run();
    }
    if (lane == 0) BulkWaitRead();  // shared memory must outlive what is sent from it
  }
  __syncwarp();
  // A block's shared memory must outlive what its neighbour sends there.
  ClusterSync();
}

}  // namespace te::gemm::hopper
