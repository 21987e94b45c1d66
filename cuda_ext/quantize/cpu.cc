// XLA's pool of CPU threads works on tiles of 128 × 128 values. A tile is widened to float once and stays in the L2
// cache while its amaxes, its two copies and its column sums are computed.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>

#include "common/cpu_float.h"
#include "quantize/quantize.h"

namespace te::quantize {
namespace {

constexpr int64_t kTilesPerTask = 4;
constexpr int64_t kStrip = 4096;  // columns of a tile where only amaxes are computed

constexpr int64_t Blocks(int64_t size) { return (size + kBlock - 1) / kBlock; }

struct Tile {
  int64_t example;     // which of the tensors
  int64_t row, col;    // of its first value
  int64_t rows, cols;  // at most 128 each; a strip has up to kStrip columns
};

// Working memory of one thread.
struct Scratch {
  alignas(64) float values[kBlock][kBlock];
  alignas(64) uint32_t row_amax[kBlock];  // the bits of floats
  alignas(64) uint32_t col_amax[kBlock];
  alignas(64) float row_scale[kBlock];
  alignas(64) float col_scale[kBlock];
  alignas(64) uint8_t codes[kBlock][kBlock];
};

// -------------------------------------------------------------------------------------------------------------- loops

// The amaxes of rows and columns as the bits of floats and, unless `values` is null, the values as floats.
template <typename T>
TE_JAX_INLINE void Load(const Matrices& x, const Tile& tile, uint32_t* row_amax, uint32_t* col_amax,
                        float (*values)[kBlock]) {
  const T* from = static_cast<const T*>(x.data) + (tile.example * x.rows + tile.row) * x.cols + tile.col;
  std::fill_n(col_amax, tile.cols, 0u);
  for (int64_t r = 0; r < tile.rows; ++r, from += x.cols) {
    uint32_t amax = 0;
#pragma omp simd reduction(max : amax)
    for (int64_t c = 0; c < tile.cols; ++c) {
      const uint32_t magnitude = FloatBits(ToFloat(from[c])) & 0x7fffffffu;
      amax = magnitude > amax ? magnitude : amax;
      col_amax[c] = magnitude > col_amax[c] ? magnitude : col_amax[c];
    }
    row_amax[r] = amax;
    if (!values) continue;
    float* to = values[r];
#pragma omp simd
    for (int64_t c = 0; c < tile.cols; ++c) to[c] = ToFloat(from[c]);
  }
}

template <typename F>
TE_JAX_INLINE void EncodeRows(const Tile& tile, Scratch& scratch) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    const float* from = scratch.values[r];
    const float scale = scratch.row_scale[r];
    uint8_t* to = scratch.codes[r];
#pragma omp simd
    for (int64_t c = 0; c < tile.cols; ++c) to[c] = EncodeFp8<F>(from[c], scale);
  }
}

template <typename F>
TE_JAX_INLINE void EncodeColumns(const Tile& tile, Scratch& scratch) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    const float* from = scratch.values[r];
    uint8_t* to = scratch.codes[r];
#pragma omp simd
    for (int64_t c = 0; c < tile.cols; ++c) to[c] = EncodeFp8<F>(from[c], scratch.col_scale[c]);
  }
}

#define TE_JAX_LOAD(T)                                                                                    \
  TE_JAX_CLONES void Load##T(const Matrices& x, const Tile& tile, uint32_t* row_amax, uint32_t* col_amax, \
                             float (*values)[kBlock]) {                                                   \
    Load<T>(x, tile, row_amax, col_amax, values);                                                         \
  }
TE_JAX_LOAD(Float32)
TE_JAX_LOAD(BFloat16)
#undef TE_JAX_LOAD

#define TE_JAX_ENCODE(F)                                                                                 \
  TE_JAX_CLONES void EncodeRows##F(const Tile& tile, Scratch& scratch) { EncodeRows<F>(tile, scratch); } \
  TE_JAX_CLONES void EncodeColumns##F(const Tile& tile, Scratch& scratch) { EncodeColumns<F>(tile, scratch); }
TE_JAX_ENCODE(E4M3)
TE_JAX_ENCODE(E5M2)
#undef TE_JAX_ENCODE

TE_JAX_CLONES void StoreColumnSums(const Scratch& scratch, const Tile& tile, const Matrices& x, float* column_sums) {
  float sums[kBlock] = {};
  for (int64_t r = 0; r < tile.rows; ++r) {
    const float* values = scratch.values[r];
#pragma omp simd
    for (int64_t c = 0; c < tile.cols; ++c) sums[c] += values[c];
  }
  const int64_t block = tile.example * Blocks(x.rows) + tile.row / kBlock;
  std::memcpy(column_sums + block * x.cols + tile.col, sums, tile.cols * sizeof(float));
}

void StoreCodes(const Scratch& scratch, const Tile& tile, const Matrices& x, uint8_t* data) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    std::memcpy(data + (tile.example * x.rows + tile.row + r) * x.cols + tile.col, scratch.codes[r], tile.cols);
  }
}

// Eight rows of eight bytes, transposed: halves, quarters and eighths of words change places.
TE_JAX_INLINE void TransposeBytes(uint64_t (&rows)[8]) {
  constexpr uint64_t kMasks[3] = {0x00000000ffffffffu, 0x0000ffff0000ffffu, 0x00ff00ff00ff00ffu};
  for (int stage = 0; stage < 3; ++stage) {
    const int distance = 4 >> stage;
    for (int i = 0; i < 8; ++i) {
      if (i & distance) continue;
      const uint64_t swapped = ((rows[i] >> (8 * distance)) ^ rows[i + distance]) & kMasks[stage];
      rows[i] ^= swapped << (8 * distance);
      rows[i + distance] ^= swapped;
    }
  }
}

void StoreTransposedCodes(const Scratch& scratch, const Tile& tile, const Matrices& x, uint8_t* transposed) {
  static_assert(std::endian::native == std::endian::little);
  for (int64_t c = 0; c < tile.cols; c += 8) {
    uint8_t turned[8][kBlock];
    for (int64_t r = 0; r < tile.rows; r += 8) {
      uint64_t words[8];
      for (int i = 0; i < 8; ++i) std::memcpy(&words[i], &scratch.codes[r + i][c], 8);
      TransposeBytes(words);
      for (int i = 0; i < 8; ++i) std::memcpy(&turned[i][r], &words[i], 8);
    }
    for (int64_t i = 0; i < std::min<int64_t>(8, tile.cols - c); ++i) {
      const int64_t col = tile.example * x.cols + tile.col + c + i;
      std::memcpy(transposed + col * x.rows + tile.row, turned[i], tile.rows);
    }
  }
}

// ------------------------------------------------------------------------------------------------------------- scales

// Compared as integers, the bits of magnitudes put NaN above infinity. Every NaN becomes the same one.
float AmaxFromBits(uint32_t bits) { return FloatFromBits(bits > kFloatInfinityBits ? kQuietNaN : bits); }

uint32_t MaxOf(const uint32_t* bits, int64_t count) { return *std::max_element(bits, bits + count); }

void AtomicMax(float& amax, float value) {
  const std::atomic_ref<float> shared(amax);
  float seen = shared.load(std::memory_order_relaxed);
  while (FloatBits(seen) < FloatBits(value) && !shared.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

float Scale(const Copies& copies, float amax) {
  const bool power_of_two = copies.power_of_two_scales;
  return copies.format == Fp8::kE4M3 ? ScaleOf<E4M3>(amax, power_of_two) : ScaleOf<E5M2>(amax, power_of_two);
}

// SetScales fills row_scale (for data) and col_scale (for transposed), and writes the tile's scale_inv. It returns
// whether both copies have the same codes, those of row_scale.

bool SetScales(const Matrices&, const Copies& copies, const TensorScaling& scaling, const Tile& tile,
               Scratch& scratch) {
  const float amax = scaling.amax[tile.example];
  const float scale = Scale(copies, amax);
  std::fill_n(scratch.row_scale, tile.rows, scale);
  for (float* scale_inv : {scaling.scale_inv, scaling.transposed_scale_inv}) {
    if (scale_inv && tile.row == 0 && tile.col == 0) scale_inv[tile.example] = ScaleInvOf(amax, scale);
  }
  if (scaling.own_amax) AtomicMax(scaling.own_amax[tile.example], AmaxFromBits(MaxOf(scratch.row_amax, tile.rows)));
  return true;
}

bool SetScales(const Matrices& x, const Copies& copies, const RowScaling& scaling, const Tile& tile, Scratch& scratch) {
  auto set = [&](const float* amax, int64_t first, int64_t count, float* scale, float* scale_inv) {
    for (int64_t i = 0; amax && i < count; ++i) scale[i] = Scale(copies, amax[first + i]);
    for (int64_t i = 0; scale_inv && i < count; ++i) scale_inv[first + i] = ScaleInvOf(amax[first + i], scale[i]);
  };
  set(scaling.row_amax, tile.example * x.rows + tile.row, tile.rows, scratch.row_scale,
      tile.col == 0 ? scaling.row_scale_inv : nullptr);
  set(scaling.col_amax, tile.example * x.cols + tile.col, tile.cols, scratch.col_scale,
      tile.row == 0 ? scaling.col_scale_inv : nullptr);
  return false;
}

bool SetScales(const Matrices& x, const Copies& copies, const BlockScaling& scaling, const Tile& tile,
               Scratch& scratch) {
  // The scales of a copy [outer, summed], from the tile's amax for each outer index.
  auto set = [&](bool block_128x128, const uint32_t* amax, int64_t outer, int64_t outer_size, int64_t count,
                 int64_t summed, int64_t summed_size, float* scale, float* scale_inv) {
    if (!scale_inv) return;
    if (block_128x128) {
      const float of_block = AmaxFromBits(MaxOf(amax, count));
      std::fill_n(scale, count, Scale(copies, of_block));
      const int64_t block = tile.example * Blocks(outer_size) + outer / kBlock;
      scale_inv[block * Blocks(summed_size) + summed / kBlock] = ScaleInvOf(of_block, scale[0]);
      return;
    }
    const int64_t block = tile.example * Blocks(summed_size) + summed / kBlock;
    for (int64_t i = 0; i < count; ++i) {
      const float of_block = AmaxFromBits(amax[i]);
      scale[i] = Scale(copies, of_block);
      scale_inv[block * outer_size + outer + i] = ScaleInvOf(of_block, scale[i]);
    }
  };
  set(scaling.data_128x128, scratch.row_amax, tile.row, x.rows, tile.rows, tile.col, x.cols, scratch.row_scale,
      scaling.scale_inv);
  set(scaling.transposed_128x128, scratch.col_amax, tile.col, x.cols, tile.cols, tile.row, x.rows, scratch.col_scale,
      scaling.transposed_scale_inv);
  return scaling.data_128x128 && scaling.transposed_128x128 && scaling.scale_inv;
}

// -------------------------------------------------------------------------------------------------------------- tiles

// Calls body(tile) for tiles of 128 rows and `width` columns, smaller at the edges, that lie in [begin, end).
template <typename Body>
void ForEachTile(const Matrices& x, int64_t width, int64_t begin, int64_t end, const Body& body) {
  const int64_t down = Blocks(x.rows), across = (x.cols + width - 1) / width;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t row = index / across % down * kBlock, col = index % across * width;
    body(Tile{index / across / down, row, col, std::min(kBlock, x.rows - row), std::min(width, x.cols - col)});
  }
}

int64_t CountTiles(const Matrices& x, int64_t width) {
  return x.count * Blocks(x.rows) * ((x.cols + width - 1) / width);
}

auto* LoadOf(const Matrices& x) { return x.dtype == DType::kFloat32 ? LoadFloat32 : LoadBFloat16; }

// Calls merge(strip, row_amax, col_amax), amaxes as the bits of floats, for strips that cover x.
template <typename Merge>
void OverStrips(const Executor& executor, const Matrices& x, const Merge& merge) {
  executor.ParallelFor(CountTiles(x, kStrip), 1, [&](int64_t begin, int64_t end) {
    uint32_t row_amax[kBlock], col_amax[kStrip];
    ForEachTile(x, kStrip, begin, end, [&](const Tile& strip) {
      LoadOf(x)(x, strip, row_amax, col_amax, nullptr);
      merge(strip, row_amax, col_amax);
    });
  });
}

// Fills the amaxes and values of a tile.
struct LoadTile {
  void operator()(const Matrices& x, const Tile& tile, Scratch& scratch) const {
    LoadOf(x)(x, tile, scratch.row_amax, scratch.col_amax, scratch.values);
  }
};

// The same where rows are gathered: side by side, they are a matrix of their own.
struct LoadGatheredTile {
  Gather gather;

  void operator()(const Matrices& x, const Tile& tile, Scratch& scratch) const {
    alignas(64) unsigned char rows[kBlock * kBlock * sizeof(float)];
    const int64_t value = x.dtype == DType::kFloat32 ? 4 : 2, bytes = tile.cols * value;
    const int32_t* index = gather.index + tile.example * x.rows + tile.row;
    const auto* table = static_cast<const unsigned char*>(x.data) + tile.example * gather.rows * x.cols * value;
    for (int64_t r = 0; r < tile.rows; ++r) {
      if (index[r] >= 0 && index[r] < gather.rows) {
        std::memcpy(rows + r * bytes, table + (index[r] * x.cols + tile.col) * value, bytes);
      } else {
        std::memset(rows + r * bytes, 0, bytes);
      }
    }
    LoadTile()({x.dtype, rows, 1, tile.rows, tile.cols}, {0, 0, 0, tile.rows, tile.cols}, scratch);
  }
};

template <typename Scaling, typename Load = LoadTile>
Status Quantize(const Executor& executor, const Matrices& x, const Copies& copies, const Scaling& scaling,
                const Load& load = {}) {
  const bool e4m3 = copies.format == Fp8::kE4M3;
  auto* encode_rows = e4m3 ? EncodeRowsE4M3 : EncodeRowsE5M2;
  auto* encode_columns = e4m3 ? EncodeColumnsE4M3 : EncodeColumnsE5M2;
  executor.ParallelFor(CountTiles(x, kBlock), kTilesPerTask, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique<Scratch>();
    ForEachTile(x, kBlock, begin, end, [&](const Tile& tile) {
      load(x, tile, *scratch);
      const bool same = SetScales(x, copies, scaling, tile, *scratch);
      if (copies.data || same) encode_rows(tile, *scratch);
      if (copies.data) StoreCodes(*scratch, tile, x, copies.data);
      if (copies.transposed && !same) encode_columns(tile, *scratch);
      if (copies.transposed) StoreTransposedCodes(*scratch, tile, x, copies.transposed);
      if (copies.column_sums) StoreColumnSums(*scratch, tile, x, copies.column_sums);
    });
  });
  return Status::Ok();
}

}  // namespace

Status AmaxOfTensor(const Executor& executor, const Matrices& x, float* amax) {
  std::fill_n(amax, x.count, 0.0f);
  OverStrips(executor, x, [&](const Tile& strip, const uint32_t* row_amax, const uint32_t*) {
    AtomicMax(amax[strip.example], AmaxFromBits(MaxOf(row_amax, strip.rows)));
  });
  return Status::Ok();
}

Status AmaxOfRows(const Executor& executor, const Matrices& x, float* row_amax, float* col_amax) {
  if (row_amax) std::fill_n(row_amax, x.count * x.rows, 0.0f);
  if (col_amax) std::fill_n(col_amax, x.count * x.cols, 0.0f);
  OverStrips(executor, x, [&](const Tile& strip, const uint32_t* rows, const uint32_t* cols) {
    const int64_t row = strip.example * x.rows + strip.row, col = strip.example * x.cols + strip.col;
    for (int64_t r = 0; row_amax && r < strip.rows; ++r) AtomicMax(row_amax[row + r], AmaxFromBits(rows[r]));
    for (int64_t c = 0; col_amax && c < strip.cols; ++c) AtomicMax(col_amax[col + c], AmaxFromBits(cols[c]));
  });
  return Status::Ok();
}

Status QuantizeTensor(const Executor& executor, const Matrices& x, const Copies& copies, const TensorScaling& scaling) {
  if (scaling.own_amax) std::fill_n(scaling.own_amax, x.count, 0.0f);
  return Quantize(executor, x, copies, scaling);
}

Status QuantizeRows(const Executor& executor, const Matrices& x, const Copies& copies, const RowScaling& scaling) {
  return Quantize(executor, x, copies, scaling);
}

Status QuantizeBlocks(const Executor& executor, const Matrices& x, const Copies& copies, const BlockScaling& scaling) {
  return Quantize(executor, x, copies, scaling);
}

Status QuantizeBlocksOfRows(const Executor& executor, const Matrices& x, const Gather& gather, const Copies& copies,
                            const BlockScaling& scaling) {
  return Quantize(executor, x, copies, scaling, LoadGatheredTile{gather});
}

}  // namespace te::quantize
