// Operations of a thread block on one tile of 128 × 128 values: load it into registers, reduce it to amaxes, encode it
// along rows and along columns, and stage both copies in shared memory.
//
// 256 threads own 8 × 8 values each, 16 threads across: a warp loads 256 contiguous bytes of two rows at a time
// (bfloat16), so that the values of a row stay within 16 lanes, and those of a column in two lanes of each warp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/fp8.h"
#include "common/vector.cuh"
#include "quantize/quantize.h"

namespace te::quantize {

inline constexpr int kTile = static_cast<int>(kBlock);
inline constexpr int kPatch = 8;                // a thread owns 8 × 8 values of a tile
inline constexpr int kAcross = kTile / kPatch;  // threads across a tile, and down
inline constexpr int kThreads = kAcross * kAcross;
inline constexpr int kWarps = kThreads / 32;
inline constexpr uint32_t kWholeWarp = 0xffffffffu;

// -------------------------------------------------------------------------------------------------- values and words

// How 8 values of a row lie in registers. Magnitudes are compared as integers, two at a time where they have 16 bits,
// which puts NaN above infinity.
template <typename T>
struct Words {
  static constexpr int kPerVector = kPer16Bytes<T>;     // values of one 16-byte load
  static constexpr int kVectors = kPatch / kPerVector;  // loads of 8 values
  static constexpr int kCount = 4 * kVectors;           // words of 8 values
  static constexpr bool kPaired = sizeof(T) == 2;

  __device__ static uint32_t Magnitudes(uint32_t word) { return word & (kPaired ? 0x7fff7fffu : 0x7fffffffu); }

  __device__ static uint32_t Max(uint32_t a, uint32_t b) {
    if constexpr (!kPaired) return max(a, b);
    uint32_t larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
  }

  // The larger of the two magnitudes of a word.
  __device__ static uint32_t Single(uint32_t word) { return kPaired ? max(word & 0xffffu, word >> 16) : word; }

  // A single magnitude as the bits of a float; every NaN as the same one.
  __device__ static uint32_t FloatBitsOf(uint32_t magnitude) {
    uint32_t bits = magnitude;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) bits = magnitude << 16;
    return bits > kFloatInfinityBits ? kQuietNaN : bits;
  }

  // The column, within the tile, of value j of the threads in lane `across`.
  __device__ static int Column(int across, int j) {
    return j / kPerVector * kAcross * kPerVector + across * kPerVector + j % kPerVector;
  }

  // Which of 16 threads across owns a column.
  __device__ static int Owner(int column) { return column / kPerVector % kAcross; }
};

template <typename T>
using Patch = uint32_t[kPatch][Words<T>::kCount];

template <typename T>
__device__ __forceinline__ float Value(const uint32_t (&words)[Words<T>::kCount], int j) {
  if constexpr (std::is_same_v<T, float>) {
    return __uint_as_float(words[j]);
  } else {
    return __uint_as_float(j % 2 ? words[j / 2] & 0xffff0000u : words[j / 2] << 16);
  }
}

// ------------------------------------------------------------------------------------------------------------- tiles

struct Shape {
  int count;
  int rows;
  int cols;
  bool aligned;  // rows and columns are multiples of 16, and all arrays start on 16 bytes

  __host__ __device__ int TilesDown() const { return (rows - 1) / kTile + 1; }
  __host__ __device__ int TilesAcross() const { return (cols - 1) / kTile + 1; }
  __host__ __device__ int64_t Tiles() const { return int64_t{count} * TilesDown() * TilesAcross(); }
};

// Where a row starts.
__device__ __forceinline__ int64_t RowOffset(int row, int length) { return int64_t{row} * length; }

// A tile of one of the tensors.
struct Tile {
  int example;
  int row;  // of tiles
  int col;

  // Where its example starts in x, and in a copy.
  __device__ int64_t Example(const Shape& shape) const { return example * RowOffset(shape.rows, shape.cols); }

  // Among the rows, and the columns, of tiles of all tensors.
  __device__ int RowOfAll(const Shape& shape) const { return example * shape.TilesDown() + row; }
  __device__ int ColOfAll(const Shape& shape) const { return example * shape.TilesAcross() + col; }
};

// Coordinates of a thread in a tile, and of its values in the matrix.
template <typename T>
struct ThreadCoord {
  int across;  // 0 … 15
  int down;    // 0 … 15
  int row;     // of its first value
  int col;     // of the tile's first value

  __device__ explicit ThreadCoord(const Tile& tile)
      : across(threadIdx.x % kAcross),
        down(threadIdx.x / kAcross),
        row(tile.row * kTile + down * kPatch),
        col(tile.col * kTile) {}

  __device__ int Column(int j) const { return col + Words<T>::Column(across, j); }

  // With aligned shapes the values of a 16-byte vector, and the rows of a patch, are all inside or all outside.
  __device__ bool Inside(const Shape& shape, int vector) const {
    return row < shape.rows && Column(vector * Words<T>::kPerVector) < shape.cols;
  }
};

template <typename T>
__device__ __forceinline__ void SetVector(Patch<T>& patch, int r, int vector, const uint4& bits) {
  patch[r][4 * vector] = bits.x;
  patch[r][4 * vector + 1] = bits.y;
  patch[r][4 * vector + 2] = bits.z;
  patch[r][4 * vector + 3] = bits.w;
}

// The values of a patch one by one, where vectors would not be aligned. row_of(r) points to row r of the patch, or is
// null: its values are zero, as are those beyond the columns.
template <typename T, typename RowOf>
__device__ __forceinline__ void LoadUnaligned(const Shape& shape, const ThreadCoord<T>& coord, Patch<T>& patch,
                                              const RowOf& row_of) {
#pragma unroll
  for (int r = 0; r < kPatch; ++r) {
    const T* row = row_of(r);
#pragma unroll
    for (int w = 0; w < Words<T>::kCount; ++w) {
      constexpr int kPerWord = 4 / sizeof(T);
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < kPerWord; ++i) {
        const int col = coord.Column(w * kPerWord + i);
        if (!row || col >= shape.cols) continue;
        const T value = row[col];
        if constexpr (sizeof(T) == 4) {
          word = reinterpret_cast<const uint32_t&>(value);
        } else {
          word |= uint32_t{reinterpret_cast<const uint16_t&>(value)} << (16 * i);
        }
      }
      patch[r][w] = word;
    }
  }
}

// The values of a patch of the tensor x; zero outside of it.
template <typename T>
__device__ __forceinline__ void Load(const T* x, const Shape& shape, const ThreadCoord<T>& coord, Patch<T>& patch) {
  using W = Words<T>;
  if (shape.aligned) {
#pragma unroll
    for (int v = 0; v < W::kVectors; ++v) {
      const T* from = x + RowOffset(coord.row, shape.cols) + coord.Column(v * W::kPerVector);
      const bool inside = coord.Inside(shape, v);
#pragma unroll
      for (int r = 0; r < kPatch; ++r) {
        const uint4* address = reinterpret_cast<const uint4*>(from + RowOffset(r, shape.cols));
        uint4 bits = make_uint4(0, 0, 0, 0);
        if (inside) bits = LoadStreaming(address);
        SetVector<T>(patch, r, v, bits);
      }
    }
    return;
  }
  LoadUnaligned<T>(shape, coord, patch, [&](int r) {
    return coord.row + r < shape.rows ? x + RowOffset(coord.row + r, shape.cols) : nullptr;
  });
}

inline constexpr int kGroupHeight = 4;

// Tiles of a tensor in groups of kGroupHeight rows of tiles, column by column: what lies near in both copies is written
// at about the same time.
__device__ __forceinline__ Tile FindTile(const Shape& shape, int index) {
  const int per_example = shape.TilesDown() * shape.TilesAcross();
  const int example = shape.count == 1 ? 0 : index / per_example;
  index -= example * per_example;
  const int per_group = kGroupHeight * shape.TilesAcross();
  const int first = index / per_group * kGroupHeight;
  const int within = index % per_group;
  const int height = min(kGroupHeight, shape.TilesDown() - first);
  const int col = height == kGroupHeight ? within / kGroupHeight : within / height;
  return {example, first + within - col * height, col};
}

// -------------------------------------------------------------------------------------------------------- reductions

// The amaxes of the columns of a patch.
template <typename T>
__device__ __forceinline__ void ColumnMagnitudes(const Patch<T>& patch, uint32_t (&largest)[Words<T>::kCount]) {
  using W = Words<T>;
#pragma unroll
  for (int w = 0; w < W::kCount; ++w) {
    largest[w] = W::Magnitudes(patch[0][w]);
#pragma unroll
    for (int r = 1; r < kPatch; ++r) largest[w] = W::Max(largest[w], W::Magnitudes(patch[r][w]));
  }
}

template <typename T>
__device__ __forceinline__ uint32_t MaxOf(const uint32_t (&words)[Words<T>::kCount]) {
  uint32_t largest = words[0];
#pragma unroll
  for (int w = 1; w < Words<T>::kCount; ++w) largest = Words<T>::Max(largest, words[w]);
  return Words<T>::Single(largest);
}

// The amaxes of rows over the 16 lanes that share them. Each lane returns that of one row of its patch, with its number
// in `row`; several lanes return the same one, and `first` is true in one of them.
template <typename T>
__device__ __forceinline__ uint32_t RowMagnitude(const Patch<T>& patch, int* row, bool* first) {
  using W = Words<T>;
  constexpr int kSlots = W::kPaired ? kPatch / 2 : kPatch;
  const int lane = threadIdx.x % kAcross;
  uint32_t slots[kSlots];
  uint32_t rows[kPatch];
#pragma unroll
  for (int r = 0; r < kPatch; ++r) {
    rows[r] = W::Magnitudes(patch[r][0]);
#pragma unroll
    for (int w = 1; w < W::kCount; ++w) rows[r] = W::Max(rows[r], W::Magnitudes(patch[r][w]));
  }
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    if constexpr (W::kPaired) {  // two rows in a word
      const uint32_t even = __byte_perm(rows[2 * s], rows[2 * s + 1], 0x5410);
      const uint32_t odd = __byte_perm(rows[2 * s], rows[2 * s + 1], 0x7632);
      slots[s] = W::Max(even, odd);
    } else {
      slots[s] = rows[s];
    }
  }
  // Each exchange halves what a lane is responsible for, until that is one word.
  int count = kSlots, slot = 0;
#pragma unroll
  for (int mask = kAcross / 2; mask > 0; mask /= 2) {
    const bool upper = lane & mask;
    if (count > 1) {
      count /= 2;
      slot = 2 * slot + upper;
#pragma unroll
      for (int s = 0; s < kSlots / 2; ++s) {
        if (s >= count) break;
        const uint32_t mine = upper ? slots[s + count] : slots[s];
        const uint32_t theirs = upper ? slots[s] : slots[s + count];
        slots[s] = W::Max(mine, __shfl_xor_sync(kWholeWarp, theirs, mask));
      }
    } else {
      slots[0] = W::Max(slots[0], __shfl_xor_sync(kWholeWarp, slots[0], mask));
    }
  }
  if constexpr (W::kPaired) {
    *row = 2 * slot + lane % 2;
    *first = (lane & 2) == 0;
    return lane % 2 ? slots[0] >> 16 : slots[0] & 0xffffu;
  } else {
    *row = slot;
    *first = lane % 2 == 0;
    return slots[0];
  }
}

__device__ __forceinline__ void AtomicMax(float* amax, uint32_t bits) {
  if (bits != 0) atomicMax(reinterpret_cast<unsigned*>(amax), bits);
}

// ------------------------------------------------------------------------------------------------------------ codes

// Four codes of scaled values.
template <typename F>
__device__ __forceinline__ uint32_t Encode(const float (&x)[4], const float (&scale)[4], bool special) {
  uint32_t codes = PackFp8<F>(MultiplyFlushed(x[0], scale[0]), MultiplyFlushed(x[1], scale[1]),
                              MultiplyFlushed(x[2], scale[2]), MultiplyFlushed(x[3], scale[3]));
  if (special) {  // infinities were saturated
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t sign = F::kInfinity == kFp8NaN ? 0u : (__float_as_uint(x[i]) >> 24) & 0x80u;
      if (isinf(x[i])) codes = (codes & ~(0xffu << (8 * i))) | (F::kInfinity | sign) << (8 * i);
    }
  }
  return codes;
}

// Codes of a patch, along rows: codes[r][h] holds values 4 h to 4 h + 3 of row r.
template <typename T, typename F, typename ScaleOfRow>
__device__ __forceinline__ void EncodeRows(const Patch<T>& patch, bool special, uint32_t (&codes)[kPatch][2],
                                           const ScaleOfRow& scale_of_row) {
#pragma unroll
  for (int r = 0; r < kPatch; ++r) {
    const float scale = scale_of_row(r);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = Value<T>(patch[r], 4 * h + i);
      codes[r][h] = Encode<F>(x, {scale, scale, scale, scale}, special);
    }
  }
}

// Codes of a patch, along columns: codes[j][h] holds rows 4 h to 4 h + 3 of column j.
template <typename T, typename F, typename ScaleOfColumn>
__device__ __forceinline__ void EncodeColumns(const Patch<T>& patch, bool special, uint32_t (&codes)[kPatch][2],
                                              const ScaleOfColumn& scale_of_column) {
#pragma unroll
  for (int j = 0; j < kPatch; ++j) {
    const float scale = scale_of_column(j);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = Value<T>(patch[4 * h + i], j);
      codes[j][h] = Encode<F>(x, {scale, scale, scale, scale}, special);
    }
  }
}

// Codes along columns from codes along rows: four transposes of 4 × 4 bytes.
__device__ __forceinline__ void Transpose(const uint32_t (&rows)[kPatch][2], uint32_t (&columns)[kPatch][2]) {
#pragma unroll
  for (int down = 0; down < 2; ++down) {
#pragma unroll
    for (int across = 0; across < 2; ++across) {
      const uint32_t a = rows[4 * down][across], b = rows[4 * down + 1][across];
      const uint32_t c = rows[4 * down + 2][across], d = rows[4 * down + 3][across];
      const uint32_t ab_low = __byte_perm(a, b, 0x5140), cd_low = __byte_perm(c, d, 0x5140);
      const uint32_t ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
      columns[4 * across][down] = __byte_perm(ab_low, cd_low, 0x5410);
      columns[4 * across + 1][down] = __byte_perm(ab_low, cd_low, 0x7632);
      columns[4 * across + 2][down] = __byte_perm(ab_high, cd_high, 0x5410);
      columns[4 * across + 3][down] = __byte_perm(ab_high, cd_high, 0x7632);
    }
  }
}

// ------------------------------------------------------------------------------------------------------------ stores

// The codes of a tile in shared memory, from where TMA takes them.
template <typename T>
struct Staged {
  using W = Words<T>;
  static constexpr int kChunks = kTile / 16;  // of 16 codes, in a row

  // A row for each column of x: first the columns that are the first of a thread's eight, of all 16 threads across,
  // then those that are the second, and so on. So neighbouring lanes write neighbouring rows, whose chunks the copy
  // engine permutes differently (a swizzle of 128 bytes): no two of eight lanes meet in a bank.
  alignas(1024) uint4 transposed[kPatch * kAcross][kChunks];
  alignas(128) uint8_t data[kTile][kTile];

  __device__ __forceinline__ void PutData(const ThreadCoord<T>& coord, const uint32_t (&codes)[kPatch][2]) {
#pragma unroll
    for (int r = 0; r < kPatch; ++r) {
      uint8_t* to = data[coord.down * kPatch + r] + coord.across * W::kPerVector;
      if constexpr (W::kVectors == 1) {
        *reinterpret_cast<uint2*>(to) = make_uint2(codes[r][0], codes[r][1]);
      } else {
        *reinterpret_cast<uint32_t*>(to) = codes[r][0];
        *reinterpret_cast<uint32_t*>(to + kTile / 2) = codes[r][1];
      }
    }
  }

  __device__ __forceinline__ void PutTransposed(const ThreadCoord<T>& coord, const uint32_t (&codes)[kPatch][2]) {
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      uint4& chunk = transposed[j * kAcross + coord.across][coord.down / 2 ^ coord.across % kChunks];
      reinterpret_cast<uint2*>(&chunk)[coord.down % 2] = make_uint2(codes[j][0], codes[j][1]);
    }
  }

  // 16 rows of x in one column of the tile.
  __device__ __forceinline__ uint4 GetTransposed(int column, int chunk) const {
    const int across = W::Owner(column);
    const int j = column / (kAcross * W::kPerVector) * W::kPerVector + column % W::kPerVector;
    return transposed[j * kAcross + across][chunk ^ across % kChunks];
  }
};

// Both copies, byte by byte, where TMA cannot.
template <typename T>
__device__ __forceinline__ void StoreUnaligned(const Shape& shape, const Tile& tile, const Staged<T>& staged,
                                               uint8_t* data, uint8_t* transposed) {
  if (data) data += tile.Example(shape);
  if (transposed) transposed += tile.Example(shape);
  for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
    const int row = tile.row * kTile + i / kTile, col = tile.col * kTile + i % kTile;
    if (data && row < shape.rows && col < shape.cols) {
      data[RowOffset(row, shape.cols) + col] = staged.data[i / kTile][i % kTile];
    }
  }
  for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
    const int col = tile.col * kTile + i / kTile, row = tile.row * kTile + i % kTile;
    if (transposed && row < shape.rows && col < shape.cols) {
      const uint4 chunk = staged.GetTransposed(i / kTile, i % kTile / 16);
      transposed[RowOffset(col, shape.rows) + row] = reinterpret_cast<const uint8_t*>(&chunk)[i % 16];
    }
  }
}

}  // namespace te::quantize
