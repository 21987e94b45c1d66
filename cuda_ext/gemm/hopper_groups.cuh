// Rows in groups, for the kernel: which tile a block computes next, and which values it must leave out.
//
// The bounds of groups are data. Every block stages them once, as the rows at which ranges begin: for each part of the
// rows the one before its first group, the groups, and the one after them. With them stands the number of tiles of rows
// before each range, so that a warp finds the range of a tile by one comparison in every lane. Ranges without rows have
// no tiles. The warp that feeds finds its block's tiles in this table and tells the warps that multiply.
//
// Groups may begin at any row. If rows of d are grouped, loads reach rows of other groups or of none: a row of a
// touches the same row of d only, so it is enough that the epilogue writes the rows of its range alone, by TMA where
// all rows of a box are such, by threads otherwise. Ranges of no group have no steps and get zeros. If the summed rows
// are grouped, the first and last step of a group may hold other rows. Threads set these to zero in shared memory, of
// both operands, since 0 · NaN is NaN. A step that lies in two groups is loaded for both.
//
// FLOPs 2nk for each row in a group, rounded up to the 64 rows of a warpgroup at the end of a group, or where sums are
// grouped 2mn for each row, rounded up to steps. Bytes: a and d once, b once for each group, as far as the tiles of a
// band share them in L2. 8 experts of 4096 × 14336 for 32768 rows are bound by the tensor cores; 128 of 2048 × 768 with
// 512 rows each write 805 MB of float32 weight gradients for 206 GFLOP, and are bound by memory.
#pragma once

#include "gemm/hopper_config.cuh"
#include "gemm/hopper_ptx.cuh"

namespace te::gemm::hopper {

// The table: RangesOf + 1 rows, and where rows of d are in groups as many numbers of tiles.
__host__ __device__ constexpr int RangesOf(const Groups& groups) { return groups.parts * (groups.count + 2); }

template <typename C>
__host__ __device__ constexpr int BytesOfTable(const Groups& groups) {
  return 4 * (RangesOf(groups) + 1) * (C::kGrouping == Grouping::kRows ? 2 : 1);
}

// The operands of a tile of a range, and the rows of it that are written.
struct WorkTile {
  int product;            // whose b, bias and d it is
  int m0;                 // of the tile
  int first_row, rows;    // those from first_row to before `rows` are written
  int first_step, steps;  // zeros where there are none
};

struct Tile {
  int range;     // of rows; none without groups
  int row_tile;  // of the range; without groups of all rows of a batch
  int n0;
};

template <typename C>
class RangeTable {
 public:
  __device__ RangeTable(const Groups& groups, uint32_t shared) : groups_(groups), rows_(shared) {}

  // Fills it by all threads of the block. Whoever reads it must wait for them.
  __device__ __forceinline__ void Stage() const {
    const int of_part = groups_.count + 2, ranges = RangesOf(groups_);
    for (int i = threadIdx.x; i <= ranges; i += C::kThreads) {
      const int part = groups_.first_part + i / of_part, within = i % of_part;
      int row = part * groups_.rows_of_part;
      if (within > 0) {
        const int bound = __ldg(groups_.bounds + static_cast<int64_t>(part) * (groups_.count + 1) + within - 1);
        row += min(max(bound, 0), groups_.rows_of_part);
      }
      StoreShared(rows_ + 4 * i, row);
    }
    __syncthreads();
    if (threadIdx.x < 32) Scan(ranges);
  }

  __device__ __forceinline__ int Row(int range) const { return LoadSharedInt(rows_ + 4 * range); }
  __device__ __forceinline__ int TilesBefore(int range) const {
    return LoadSharedInt(rows_ + 4 * (RangesOf(groups_) + 1 + range));
  }

  // Where the first tile of a range begins: TMA wants boxes of scales to begin at 16 bytes.
  static __device__ __forceinline__ int FirstRow(int row) { return C::kMode == Mode::kBlock ? row & ~3 : row; }

 private:
  // Bounds below those before them are raised to these.
  __device__ __forceinline__ void Scan(int ranges) const {
    int row_before = 0, tiles_before = 0;
    for (int first = 0; first <= ranges; first += 32) {
      const int lane = threadIdx.x, i = min(first + lane, ranges), next = min(i + 1, ranges);
      int row = Row(i);
      const int next_row = Row(next);
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, row, distance);
        if (lane >= distance) row = max(row, other);
      }
      row = max(row, row_before);
      row_before = __shfl_sync(~0u, row, 31);
      if (first + lane <= ranges) StoreShared(rows_ + 4 * i, row);
      if constexpr (C::kGrouping == Grouping::kRows) {
        const bool has_rows = first + lane < ranges && next_row > row;
        const int tiles = has_rows ? CeilDiv(next_row - FirstRow(row), C::kBM) : 0;
        int through = tiles;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
          const int other = __shfl_up_sync(~0u, through, distance);
          if (lane >= distance) through += other;
        }
        if (first + lane <= ranges) {
          StoreShared(rows_ + 4 * (ranges + 1 + first + lane), tiles_before + through - tiles);
        }
        tiles_before += __shfl_sync(~0u, through, 31);
      }
      __syncwarp();
    }
  }

  const Groups& groups_;
  const uint32_t rows_;
};

// The tiles of a block, in the order in which it computes them, where rows are in groups. One range follows another, so
// that what runs at once shares its b in L2, and within a range bands as without groups. Called by a whole warp.
template <typename C>
class GroupedTiles {
 public:
  __device__ GroupedTiles(const Groups& groups, const RangeTable<C>& table)
      : groups_(groups), table_(table), next_(blockIdx.x / 2) {}

  __device__ __forceinline__ bool Next(const Problem& p, Tile* tile) {
    const int columns = CeilDiv(p.n, C::kClusterN);
    int within, rows;
    if constexpr (C::kGrouping == Grouping::kRows) {
      const int row_tile = next_ / columns;
      if (row_tile >= table_.TilesBefore(RangesOf(groups_))) return false;
      tile->range = RangeOf(row_tile);
      const int before = table_.TilesBefore(tile->range);
      within = next_ - before * columns;
      rows = table_.TilesBefore(tile->range + 1) - before;
    } else {
      rows = CeilDiv(p.m, C::kBM);
      int group = next_ / (rows * columns);
      // TMA adds float32 to d itself, and nothing has to be added.
      while (p.accumulator != nullptr && p.d_type == Type::kFloat32 && group < groups_.count &&
             table_.Row(group + 2) == table_.Row(group + 1)) {
        next_ += gridDim.x / 2;
        group = next_ / (rows * columns);
      }
      if (group >= groups_.count) return false;
      tile->range = group + 1;
      within = next_ - group * rows * columns;
    }
    const int band = within / (C::kBand * columns);
    const int rows_of_band = min(C::kBand, rows - band * C::kBand);
    const int of_band = within - band * C::kBand * columns;
    tile->row_tile = band * C::kBand + of_band % rows_of_band;
    tile->n0 = of_band / rows_of_band * C::kClusterN + ClusterRank() * C::kBN;
    next_ += gridDim.x / 2;
    return true;
  }

  __device__ __forceinline__ WorkTile WorkTileOf(const Problem& p, const Tile& tile) const {
    const int begin = table_.Row(tile.range), end = table_.Row(tile.range + 1);
    const int group = tile.range % (groups_.count + 2) - 1;
    if constexpr (C::kGrouping == Grouping::kSums) {
      const int first_step = begin / C::kBK;
      return {group,      tile.row_tile * C::kBM,
              0,          static_cast<int>(p.m),
              first_step, end > begin ? CeilDiv(end, C::kBK) - first_step : 0};
    }
    const bool is_group = 0 <= group && group < groups_.count;
    return {group, RangeTable<C>::FirstRow(begin) + tile.row_tile * C::kBM,
            begin, end,
            0,     is_group ? CeilDiv(p.k, C::kBK) : 0};
  }

 private:
  // The last range with no more than so many tiles before it. Ranges come in order, so one looks no further back.
  __device__ __forceinline__ int RangeOf(int row_tile) {
    for (;; first_ += 32) {
      const int range = first_ + static_cast<int>(threadIdx.x % 32);
      const bool begun = range < RangesOf(groups_) && table_.TilesBefore(min(range, RangesOf(groups_))) <= row_tile;
      const int count = __popc(__ballot_sync(~0u, begun));
      if (count < 32) return first_ + count - 1;
    }
  }

  const Groups& groups_;
  const RangeTable<C>& table_;
  int next_;
  int first_ = 0;
};

// How the warps that multiply learn of their tiles where rows are in groups: the one that feeds finds them, some ahead,
// and tells where each lies. If every warp looked for itself, all would do so between two tiles, when the tensor cores
// have nothing else to do: 1 to 15% of the products of 128 small groups (docs/measurements.md).
template <typename C>
class TileSlots {
 public:
  explicit __device__ TileSlots(uint32_t shared) : shared_(shared) {}

  __device__ __forceinline__ void Init() const {
    for (int i = 0; i < C::kSlots; ++i) {
      BarrierInit(Full(i), 1);
      BarrierInit(Empty(i), C::kMathWarps);
    }
  }

  // By the producer.
  __device__ __forceinline__ void Publish(const WorkTile& work_tile, int n0) {
    BarrierWait(Empty(ring_.stage), ring_.parity ^ 1);
    StoreShared(Slot(), Chunk(work_tile.m0, work_tile.first_row, work_tile.rows, n0));
    StoreShared(Slot() + 16, Chunk(work_tile.steps, work_tile.product, work_tile.first_step, 0));
    BarrierArrive(Full(ring_.stage));
    ring_.Advance();
  }
  __device__ __forceinline__ void PublishEnd() { Publish({0, 0, 0, 0, 0, kEnd}, 0); }

  // By whole warps that multiply, which release every tile before they ask for the next.
  __device__ __forceinline__ bool Next(const Problem&, Tile* tile) const {
    BarrierWait(Full(ring_.stage), ring_.parity);
    tile->n0 = LoadSharedInt(Slot() + 12);
    return LoadSharedInt(Slot() + 16) != kEnd;
  }
  __device__ __forceinline__ WorkTile WorkTileOf(const Problem&, const Tile&) const {
    const uint4 rows = LoadSharedChunk(Slot()), sum = LoadSharedChunk(Slot() + 16);
    return {static_cast<int>(sum.y),  static_cast<int>(rows.x), static_cast<int>(rows.y),
            static_cast<int>(rows.z), static_cast<int>(sum.z),  static_cast<int>(sum.x)};
  }
  __device__ __forceinline__ void Release(int lane) {
    __syncwarp();
    if (lane == 0) BarrierArrive(Empty(ring_.stage));
    ring_.Advance();
  }

 private:
  static constexpr int kEnd = -1;  // instead of a number of steps

  static __device__ __forceinline__ uint4 Chunk(int x, int y, int z, int w) {
    return {static_cast<uint32_t>(x), static_cast<uint32_t>(y), static_cast<uint32_t>(z), static_cast<uint32_t>(w)};
  }
  __device__ __forceinline__ uint32_t Slot() const { return shared_ + 32 * ring_.stage; }
  __device__ __forceinline__ uint32_t Full(int slot) const { return shared_ + 32 * C::kSlots + 8 * slot; }
  __device__ __forceinline__ uint32_t Empty(int slot) const { return shared_ + 40 * C::kSlots + 8 * slot; }

  const uint32_t shared_;
  Ring<C::kSlots> ring_;
};

// Sets values of a tile in shared memory to zero but for those of k in [first, last), counted from the tile's first. By
// all threads that multiply, of which `thread` is one.
template <typename C, bool kSummedFirst, int kBytes>
__device__ __forceinline__ void KeepSummed(uint32_t tile, int first, int last, int thread) {
  static_assert(kBytes % 16 == 0);
  for (int chunk = thread; chunk < kBytes / 16; chunk += 32 * C::kMathWarps) {
    const uint32_t at = tile + 16 * chunk;
    const int line = chunk / 8;
    if constexpr (kSummedFirst) {
      const int k = line % C::kBK;
      if (k < first || k >= last) StoreShared(at, uint4{});
    } else {
      static_assert(BytesOf(C::kFormats) == 1);
      const int k = 16 * (chunk % 8 ^ line % 8);  // of the chunk: see `Epilogue::Stage`
      if (k >= first && k + 16 <= last) continue;
      uint4 values = LoadSharedChunk(at);
      uint32_t* const words[] = {&values.x, &values.y, &values.z, &values.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int from = min(max(first - k - 4 * i, 0), 4), to = min(max(last - k - 4 * i, 0), 4);
        const uint64_t kept = to > from ? (uint64_t{1} << 8 * to) - (uint64_t{1} << 8 * from) : 0;
        *words[i] &= static_cast<uint32_t>(kept);
      }
      StoreShared(at, values);
    }
  }
}

}  // namespace te::gemm::hopper
