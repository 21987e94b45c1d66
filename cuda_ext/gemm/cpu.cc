// Results are cut into tiles, and XLA's pool of threads shares them out. A thread turns the panels of both operands
// that its tile needs into float32, 256 summed values at a time, and multiplies them by the BLAS that scipy brings.
// Scales of tensors and rows are applied to the result, those of blocks to the panels. A panel of 256 × 256 values is
// converted once for 256 multiplications of each value, and all three stay in the L2 cache.
//
// The BLAS has threads too. It is given products of 64 × 64 × 64 values, for which OpenBLAS, which scipy's wheels hold,
// never wakes them: all parallelism is that of XLA's pool, neither oversubscribes the other, no call waits for another,
// and the order of sums does not depend on how many threads there are. At this size one thread reaches 80% of what
// large products reach (81 of 102 GFLOP/s measured on an AMD EPYC).

#include "gemm/cpu.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include "common/cpu_float.h"
#include "common/cpu_math.h"
#include "common/fp8.h"

namespace te::gemm {
namespace {

constexpr int64_t kLargestTile = 256;
constexpr int64_t kSmallestTile = 64;
constexpr int64_t kDepth = 256;       // summed values of a panel: a multiple of blocks
constexpr int64_t kEnoughTiles = 64;  // for all threads to have some; fewer are cut smaller
constexpr int64_t kBlasTile = 64;

// ------------------------------------------------------------------------------------------------------- the BLAS

using Sgemm = void (*)(char*, char*, int*, int*, int*, float*, float*, int*, float*, int*, float*, float*, int*);

struct Blas {
  Sgemm sgemm;
  std::string problem;
};

std::atomic<const Blas*> blas{nullptr};

// "void (char *, int *, …)" → {"void", "char *", "int *", …}, where Cython's names of single precision become "float".
std::vector<std::string> TypesOf(const std::string& signature) {
  std::vector<std::string> types{""};
  for (const char c : signature) {
    if (c == '(' || c == ',') {
      types.emplace_back();
    } else if (c != ' ' && c != ')') {
      types.back() += c;
    }
  }
  for (std::string& type : types) {
    if (type.ends_with("cython_blas_s*")) type = "float*";
  }
  return types;
}

// --------------------------------------------------------------------------------------------------- scratch memory

struct Deleter {
  void operator()(float* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
};
using Memory = std::unique_ptr<float[], Deleter>;

// Scratch memory of a call. It is kept for the next one: as many as ever ran at the same time.
class Scratch {
 public:
  explicit Scratch(size_t count) {
    {
      const std::lock_guard lock(mutex());
      if (!kept().empty()) {
        memory_ = std::move(kept().back());
        kept().pop_back();
      }
    }
    if (memory_.second < count) {
      memory_.first.reset(static_cast<float*>(::operator new[](count * sizeof(float), std::align_val_t{64})));
      memory_.second = count;
    }
    next_ = memory_.first.get();
  }
  ~Scratch() {
    const std::lock_guard lock(mutex());
    kept().push_back(std::move(memory_));
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* Take(int64_t count) { return std::exchange(next_, next_ + count); }

 private:
  using Sized = std::pair<Memory, size_t>;
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::vector<Sized>& kept() {
    static auto* kept = new std::vector<Sized>;
    return *kept;
  }

  Sized memory_{};
  float* next_;
};

// ------------------------------------------------------------------------------------------------------ inner loops

#define TE_JAX_LOAD(T)                                                                         \
  TE_JAX_CLONES void Load##T(const T* in, int64_t count, float scale, float* __restrict out) { \
    _Pragma("omp simd") for (int64_t i = 0; i < count; ++i) out[i] = ToFloat(in[i]) * scale;   \
  }
TE_JAX_LOAD(Float32)
TE_JAX_LOAD(BFloat16)
TE_JAX_LOAD(Float16)
#undef TE_JAX_LOAD

#define TE_JAX_LOAD_FP8(F)                                                                           \
  TE_JAX_CLONES void Load##F(const uint8_t* in, int64_t count, float scale, float* __restrict out) { \
    _Pragma("omp simd") for (int64_t i = 0; i < count; ++i) out[i] = DecodeFp8<F>(in[i]) * scale;    \
  }
TE_JAX_LOAD_FP8(E4M3)
TE_JAX_LOAD_FP8(E5M2)
#undef TE_JAX_LOAD_FP8

#define TE_JAX_STORE(T)                                                               \
  TE_JAX_CLONES void Store##T(const float* x, int64_t count, T* __restrict out) {     \
    _Pragma("omp simd") for (int64_t i = 0; i < count; ++i) FromFloat(x[i], out + i); \
  }
TE_JAX_STORE(Float32)
TE_JAX_STORE(BFloat16)
TE_JAX_STORE(Float16)
#undef TE_JAX_STORE

TE_JAX_CLONES void Multiply(float* x, int64_t count, float factor) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

// The factors are multiplied first: x by one alone may overflow.
TE_JAX_CLONES void MultiplyByEach(float* x, int64_t count, float factor, const float* factors) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) x[i] *= factor * factors[i];
}

TE_JAX_CLONES void Add(float* x, int64_t count, const float* y) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) x[i] += y[i];
}

// 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)), without the cancellation. Exp ends at 80.
TE_JAX_CLONES void Gelu(float* x, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float exponent = -2.0f * (0.7978845608028654f * (x[i] + 0.044715f * x[i] * x[i] * x[i]));
    const float gate = 1.0f / (1.0f + Exp(exponent));
    x[i] *= exponent > 79.0f ? 0.0f : gate;
  }
}

void Load(Type type, const void* base, int64_t offset, int64_t count, float scale, float* out) {
  const void* in = static_cast<const char*>(base) + offset * SizeOf(type);
  switch (type) {
    case Type::kFloat32:
      return LoadFloat32(static_cast<const Float32*>(in), count, scale, out);
    case Type::kBFloat16:
      return LoadBFloat16(static_cast<const BFloat16*>(in), count, scale, out);
    case Type::kFloat16:
      return LoadFloat16(static_cast<const Float16*>(in), count, scale, out);
    case Type::kE4M3:
      return LoadE4M3(static_cast<const uint8_t*>(in), count, scale, out);
    case Type::kE5M2:
      return LoadE5M2(static_cast<const uint8_t*>(in), count, scale, out);
  }
}

void Store(Type type, const float* x, int64_t count, void* base, int64_t offset) {
  void* out = static_cast<char*>(base) + offset * SizeOf(type);
  switch (type) {
    case Type::kFloat32:
      return StoreFloat32(x, count, static_cast<Float32*>(out));
    case Type::kBFloat16:
      return StoreBFloat16(x, count, static_cast<BFloat16*>(out));
    default:
      return StoreFloat16(x, count, static_cast<Float16*>(out));
  }
}

// ------------------------------------------------------------------------------------------------------------- tiles

Range RangeAt(int64_t index, int64_t step, int64_t size) { return {index * step, std::min(step, size - index * step)}; }

// A float32 matrix of outer by summed values, row-major, or of summed by outer ones, as its operand is.
struct Panel {
  const float* data;
  int64_t stride;
  bool summed_first;

  const float* At(int64_t outer, int64_t summed) const {
    return data + (summed_first ? summed * stride + outer : outer * stride + summed);
  }
};

// Blocks of 128 summed values, of one outer value or of 128.
struct BlockScales {
  const float* data;
  int64_t outer_stride;
  int64_t block_stride;
  int64_t outer_per_scale;

  float At(int64_t outer, int64_t summed) const {
    return data[outer / outer_per_scale * outer_stride + summed / kBlockSize * block_stride];
  }
};

Panel LoadPanel(const Operand& operand, int64_t outer_size, int64_t summed_size, Range outer, Range summed,
                const BlockScales* scales, float* out) {
  const bool summed_first = operand.summed_first;
  const Range rows = summed_first ? summed : outer, columns = summed_first ? outer : summed;
  const int64_t stride = summed_first ? outer_size : summed_size;
  for (int64_t row = 0; row < rows.count; ++row) {
    for (int64_t i = 0, count; i < columns.count; i += count) {
      // Up to the end of a block, in the middle of which the range may begin.
      const int64_t to_end = kBlockSize - (columns.begin + i) % kBlockSize;
      count = scales == nullptr ? columns.count : std::min(to_end, columns.count - i);
      const float scale = scales == nullptr ? 1.0f : scales->At(rows.begin + row, columns.begin + i);
      Load(operand.type, operand.data, (rows.begin + row) * stride + columns.begin + i, count, scale,
           out + row * columns.count + i);
    }
  }
  return {out, columns.count, summed_first};
}

// sums [m, n] (+)= A [m, k] B [n, k], row-major. Fortran sees every matrix transposed.
void MultiplyPanels(Sgemm multiply, const Panel& a, const Panel& b, int64_t m, int64_t n, int64_t k, bool add,
                    float* sums) {
  char b_operation = b.summed_first ? 'N' : 'T', a_operation = a.summed_first ? 'T' : 'N';
  int a_stride = static_cast<int>(a.stride), b_stride = static_cast<int>(b.stride), stride = static_cast<int>(n);
  float alpha = 1.0f;
  for (int64_t summed = 0; summed < k; summed += kBlasTile) {
    int depth = static_cast<int>(std::min(kBlasTile, k - summed));
    float beta = add || summed > 0 ? 1.0f : 0.0f;
    for (int64_t row = 0; row < m; row += kBlasTile) {
      int columns = static_cast<int>(std::min(kBlasTile, m - row));
      for (int64_t column = 0; column < n; column += kBlasTile) {
        int rows = static_cast<int>(std::min(kBlasTile, n - column));
        multiply(&b_operation, &a_operation, &rows, &columns, &depth, &alpha, const_cast<float*>(b.At(column, summed)),
                 &b_stride, const_cast<float*>(a.At(row, summed)), &a_stride, &beta, sums + row * n + column, &stride);
      }
    }
  }
}

// Scales a tile [rows, columns] of sums, adds and applies what follows, and writes it to D.
void Finish(const Problem& p, float* sums, Range rows, Range columns) {
  float other[kLargestTile];
  for (int64_t i = 0; i < rows.count; ++i) {
    float* const x = sums + i * columns.count;
    const int64_t row = rows.begin + i, offset = row * p.n + columns.begin;
    if (p.scaling == Scaling::kTensor) {
      Multiply(x, columns.count, *p.a.scales * *p.b.scales);
    } else if (p.scaling == Scaling::kRow) {
      MultiplyByEach(x, columns.count, p.a.scales[row], p.b.scales + columns.begin);
    }
    if (p.accumulator != nullptr) {
      Load(p.d_type, p.accumulator, offset, columns.count, 1.0f, other);
      Add(x, columns.count, other);
    }
    if (p.bias != nullptr) {
      Load(p.d_type, p.bias, columns.begin, columns.count, 1.0f, other);
      Add(x, columns.count, other);
    }
    if (p.preactivation != nullptr) Store(p.d_type, x, columns.count, p.preactivation, offset);
    if (p.gelu) Gelu(x, columns.count);
    Store(p.d_type, x, columns.count, p.d, offset);
  }
}

int64_t TilesAlong(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

// The number of the first tile of each piece, and of all tiles.
std::vector<int64_t> FirstTiles(std::span<const Piece> pieces, int64_t tile) {
  std::vector<int64_t> firsts{0};
  firsts.reserve(pieces.size() + 1);
  for (const Piece& piece : pieces) {
    firsts.push_back(firsts.back() + TilesAlong(piece.rows.count, tile) * TilesAlong(piece.problem.n, tile));
  }
  return firsts;
}

// One tile of D. The scratch memory is that of two panels and of the tile.
void RunTile(Sgemm sgemm, const Piece& piece, Range rows, Range columns, float* a_scratch, float* b_scratch,
             float* sums) {
  const Problem& p = piece.problem;
  const bool blocks = p.scaling == Scaling::kBlock;
  const auto multiply = [&](const OperandPair& pair, Range all_summed, bool add) {
    const int64_t k_blocks = (pair.k + kBlockSize - 1) / kBlockSize;
    const BlockScales a_blocks{pair.a.scales, 1, p.m, 1}, b_blocks{pair.b.scales, k_blocks, 1, kBlockSize};
    for (int64_t k = 0; k < all_summed.count; k += kDepth) {
      const Range summed{all_summed.begin + k, std::min(kDepth, all_summed.count - k)};
      const Panel a = LoadPanel(pair.a, p.m, pair.k, rows, summed, blocks ? &a_blocks : nullptr, a_scratch);
      const Panel b = LoadPanel(pair.b, p.n, pair.k, columns, summed, blocks ? &b_blocks : nullptr, b_scratch);
      MultiplyPanels(sgemm, a, b, rows.count, columns.count, summed.count, add || k > 0, sums);
    }
  };
  if (piece.summed.count == 0) std::memset(sums, 0, rows.count * columns.count * sizeof(float));
  multiply({p.a, p.b, p.k}, piece.summed, false);
  for (const OperandPair& pair : piece.more) multiply(pair, {0, pair.k}, true);
  Finish(p, sums, rows, columns);
}

}  // namespace

void UseSgemm(void* function, std::string signature) {
  static const std::vector<std::string> kTypes = {"void",   "char*", "char*",  "int*", "int*",   "int*",   "float*",
                                                  "float*", "int*",  "float*", "int*", "float*", "float*", "int*"};
  const bool fits = function != nullptr && TypesOf(signature) == kTypes;
  // Never freed: another thread may be multiplying.
  blas = fits ? new Blas{reinterpret_cast<Sgemm>(function), ""} : new Blas{nullptr, "its sgemm is " + signature};
}

Status RunPieces(const Executor& executor, std::span<const Piece> pieces) {
  const Blas* known = blas;
  if (known == nullptr || known->sgemm == nullptr) {
    return Status::Failed("scipy's BLAS cannot be used (" + (known ? known->problem : "it exports no sgemm") +
                          "); install another scipy, or use implementation='reference'");
  }
  int64_t tile = kLargestTile;
  std::vector<int64_t> firsts = FirstTiles(pieces, tile);
  while (tile > kSmallestTile && firsts.back() < kEnoughTiles) firsts = FirstTiles(pieces, tile /= 2);

  executor.ParallelFor(firsts.back(), 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(2 * tile * kDepth + tile * tile);
    float* a_scratch = scratch.Take(tile * kDepth);
    float* b_scratch = scratch.Take(tile * kDepth);
    float* sums = scratch.Take(tile * tile);
    for (int64_t i = begin; i < end; ++i) {
      const auto index = std::upper_bound(firsts.begin(), firsts.end(), i) - firsts.begin() - 1;
      const Piece& piece = pieces[index];
      const int64_t along_n = TilesAlong(piece.problem.n, tile), number = i - firsts[index];
      Range rows = RangeAt(number / along_n, tile, piece.rows.count);
      rows.begin += piece.rows.begin;
      const Range columns = RangeAt(number % along_n, tile, piece.problem.n);
      RunTile(known->sgemm, piece, rows, columns, a_scratch, b_scratch, sums);
    }
  });
  return Status::Ok();
}

Status Run(const Executor& executor, const Problem& p) {
  for (int64_t i = 0; i < p.batch.count; ++i) {
    const Piece piece{MemberOf(p, i), {0, p.m}, {0, p.k}};
    if (Status status = RunPieces(executor, {&piece, 1}); !status.ok()) return status;
  }
  return Status::Ok();
}

Status RunSum(const Executor& executor, const Problem& p, std::span<const OperandPair> more) {
  const Piece piece{p, {0, p.m}, {0, p.k}, {more.begin(), more.end()}};
  return RunPieces(executor, {&piece, 1});
}

}  // namespace te::gemm
