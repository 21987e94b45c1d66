// From sums in registers to values of d: scales, bias, what is there already, and the way out through shared memory.
#pragma once

#include <cuda_bf16.h>

#include "gemm/hopper_config.cuh"
#include "gemm/hopper_groups.cuh"
#include "gemm/hopper_ptx.cuh"

namespace te::gemm::hopper {

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

// The sums of one warp, and what is done with them after the last step. Of every 64 × 8 values of a warpgroup, a thread
// holds two neighbours in a row, lane / 4 of its warp's sixteen, and two in the row eight below.
//
// Each part is a loop of its own behind a uniform branch: this code runs once a tile, so it costs what must be fetched
// of it rather than what it computes. The way out is TMA's: it writes, or adds, boxes of 16 rows and 128
// bytes from shared memory while the next tile is under way, and leaves out what lies outside d.
template <typename C>
class Epilogue {
 public:
  __device__ Epilogue(const Arguments& arguments, float (&total)[C::kSubtiles][C::kBN / 2], const WorkTile& work_tile,
                      int group_row, int n0, uint32_t staging)
      : arguments_(arguments),
        p_(arguments.problem),
        total_(total),
        lane_(threadIdx.x % 32),
        product_(work_tile.product),
        row_(work_tile.m0 + group_row + threadIdx.x / 32 % 4 * 16),
        column_(n0),
        staging_(staging),
        rows_left_((C::kGrouping == Grouping::kRows ? work_tile.rows : static_cast<int>(p_.m)) - row_),
        columns_left_(static_cast<int>(p_.n) - n0),
        rows_before_(work_tile.first_row - row_),
        is_zero_(C::kGrouping != Grouping::kNone && work_tile.steps == 0) {}

  __device__ __forceinline__ void Run() {
    // With blocks the sums are scaled already. Where nothing was summed, scales are those of nothing: they may be NaN.
    if constexpr (C::kMode != Mode::kBlock && C::kFormats != Formats::kBFloat16) {
      if (p_.scaling == Scaling::kRow) {
        if (!is_zero_) ScaleRowsAndColumns();
      } else if (!is_zero_) {
        Scale(__ldg(p_.a.scales + product_ * p_.batch.a_scales_stride) *
              __ldg(p_.b.scales + product_ * p_.batch.b_scales_stride));
      }
    }
    if (p_.d_type == Type::kFloat32) {
      Finish<float>();
    } else {
      Finish<__nv_bfloat16>();
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
    const float* const row_scales = p_.a.scales + product_ * p_.batch.a_scales_stride + row_;
    float row_scale[C::kSubtiles][2];
#pragma unroll
    for (int s = 0; s < C::kSubtiles; ++s) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const int row = s * 64 + below * 8 + lane_ / 4;
        row_scale[s][below] = row < rows_left_ ? __ldg(row_scales + row) : 0.0f;
      }
    }
    const float* const scales = p_.b.scales + product_ * p_.batch.b_scales_stride + column_ + lane_ % 4 * 2;
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
    if (p_.bias != nullptr && !is_zero_) AddBias<T>();
    // TMA adds float32 itself; sums of 16-bit values are rounded once, here.
    if (sizeof(T) == 2 && p_.accumulator != nullptr) Accumulate<T>();
    Write<T>();
  }

  template <typename T>
  __device__ __forceinline__ void AddBias() {
    const T* const bias = static_cast<const T*>(p_.bias) + product_ * p_.batch.bias_stride + column_ + lane_ % 4 * 2;
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
        const T* const from = static_cast<const T*>(p_.accumulator) + product_ * p_.batch.d_stride +
                              static_cast<int64_t>(row_ + row) * p_.n + column_ + lane_ % 4 * 2;
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
      if constexpr (C::kGrouping == Grouping::kRows) {
#pragma unroll
        for (int i = 0; i < C::kStagedBoxes; ++i) {
          const int subtile = (first + i) / kBoxes, box = (first + i) % kBoxes;
          if (!IsWhole(subtile)) WriteRows<T>(subtile, column_ + box * kBoxColumns, staging_ + i * C::kBytesBox);
        }
      }
      if (lane_ == 0) {
#pragma unroll
        for (int i = 0; i < C::kStagedBoxes; ++i) {
          const int subtile = (first + i) / kBoxes, box = (first + i) % kBoxes;
          if (C::kGrouping == Grouping::kRows && !IsWhole(subtile)) continue;
          const int column = column_ + box * kBoxColumns, row = row_ + subtile * 64;
          if (sizeof(T) == 4 && p_.accumulator != nullptr) {
            AddBox(&arguments_.d, column, row, product_, staging_ + i * C::kBytesBox);
          } else {
            const int of_d = C::kGrouping == Grouping::kRows ? 0 : product_;
            StoreBox(&arguments_.d, column, row, of_d, staging_ + i * C::kBytesBox);
          }
        }
        BulkCommit();
      }
    }
  }

  // Whether all of a subtile's rows are to be written.
  __device__ __forceinline__ bool IsWhole(int subtile) const {
    return subtile * 64 >= rows_before_ && subtile * 64 + 16 <= rows_left_;
  }

  // Writes those rows of a staged box that are of the range. TMA would write all.
  template <typename T>
  __device__ __forceinline__ void WriteRows(int subtile, int column, uint32_t box) const {
    T* const d = static_cast<T*>(p_.d);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * i + lane_ / 8, chunk = lane_ % 8, of_chunk = column + chunk * (16 / sizeof(T));
      const bool is_of_range = subtile * 64 + row >= rows_before_ && subtile * 64 + row < rows_left_;
      if (is_of_range && of_chunk < p_.n) {
        const int64_t to = static_cast<int64_t>(row_ + subtile * 64 + row) * p_.n + of_chunk;
        *reinterpret_cast<uint4*>(d + to) = LoadSharedChunk(box + row * 128 + (chunk ^ row & 7) * 16);
      }
    }
  }

  // Packs 16 rows of 128 bytes. A row's eight chunks of 16 bytes are permuted by its number, as TMA expects
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
  const int product_, row_, column_;  // of d, where the warp's first subtile begins
  const uint32_t staging_;
  const int rows_left_, columns_left_;
  const int rows_before_;  // of the range that the tile belongs to
  const bool is_zero_;
};

}  // namespace te::gemm::hopper
