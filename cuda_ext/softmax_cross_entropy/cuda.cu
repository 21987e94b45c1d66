// Statistics: one read of the logits by online softmax, three floats written for each row.
// Gradient: one read and one write, elementwise.
//
// Bytes per logit: its size for the statistics, twice that for the gradient. On an H200 (4.3 TB/s measured) 8192 ×
// 128256 bfloat16 cannot take less than 0.49 + 0.98 ms. Per logit and pass: one MUFU.EX2 (16 a clock and SM) and six
// to nine FP32 instructions (128 a clock and SM), 60% and 50% of the statistics' time, so loads must run ahead of the
// arithmetic: every thread keeps kUnroll 16-byte loads in flight. Sizes were tuned on an H200 (docs/measurements.md).
//
// In the statistics a row belongs to a few lanes (short rows), to one thread block, or to a cluster of thread blocks
// that merge through distributed shared memory (long rows, too few of them to fill the GPU). In the gradient every
// thread block takes a stretch of one row, whatever its length.
//
// Both at once: one read and one write, 2 × the size of a logit, with the row in the shared memory of a cluster in
// between; rows that do not fit there take both passes. In FP8: the quantizing kernel computes the gradient on the way;
// one read, and a byte for each copy.

#include <cooperative_groups.h>

#include <algorithm>
#include <climits>

#include "common/block_limits.h"
#include "common/copy_async.cuh"
#include "common/cuda_status.h"
#include "common/vector.cuh"
#include "quantize/launch.cuh"
#include "softmax_cross_entropy/softmax_cross_entropy.h"

namespace te::softmax_cross_entropy {
namespace {

namespace cg = cooperative_groups;

constexpr int kWarp = 32;
constexpr int kLaneUnroll = 4;               // statistics, rows on lanes
constexpr int kLaneThreads = 256;            // threads of a block then
constexpr int kBlockUnroll = 8;              // statistics, rows on blocks
constexpr int kBlockThreads = 128;           // threads of a block then
constexpr int kBlocksPerMultiprocessor = 8;  // bounds the registers: a row's end idles one block in eight
constexpr int kBothThreads = 256;            // statistics and gradient
constexpr int kBothBytes = 72 << 10;         // of a row in a block's shared memory: three blocks a multiprocessor
constexpr int kMostBothBytes = 220 << 10;    // where clusters of kMaxCluster blocks need more, if the GPU has them
constexpr int kGradientUnroll = 4;
constexpr int kGradientThreads = 1024;
constexpr int kMaxCluster = 8;  // the largest size that every GPU with clusters can schedule
constexpr float kLog2E = 1.4426950408889634f;

// Callers subtract before this multiplies: one fused z·log2e - base·log2e is an instruction less, but rounds
// base·log2e, and at logits of 10^4 exp would be off by 10^-3.
__device__ float Exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * kLog2E));
  return y;
}

// Rounded before anything is subtracted: a fused softcap · tanh - max may exceed 0 by half a digit of max, which for
// large caps is a large exponent.
template <bool kSoftcap>
__device__ float Cap(float x, float softcap, float inverse_softcap) {
  return kSoftcap ? __fmul_rn(softcap, tanhf(x * inverse_softcap)) : x;
}

// A row as 16-byte vectors in the middle and fewer than two vectors' worth of loose elements around them, where it does
// not start or stop on a 16-byte boundary.
template <typename T>
struct Split {
  static constexpr int kN = kPer16Bytes<T>;
  int64_t head;
  int64_t vectors;
  int64_t loose;

  __device__ Split(const T* row, int64_t vocab) {
    const int64_t past = (reinterpret_cast<uintptr_t>(row) % 16) / sizeof(T);
    head = min(vocab, past == 0 ? int64_t{0} : kN - past);
    vectors = (vocab - head) / kN;
    loose = vocab - vectors * kN;
  }
  __device__ int64_t ColumnOfLoose(int64_t i) const { return i < head ? i : i + vectors * kN; }
};

// ---------------------------------------------------------------------------------------------------- statistics

// Running max and Σ exp(z - max), with Σ z beside them. Without initialisers: every thread would run them on arrays in
// shared memory, while others already write there.
struct Partial {
  float max;
  float sum;
  float total;
};

__device__ Partial EmptyPartial() { return {-INFINITY, 0.0f, 0.0f}; }

// The value to subtract from logits before exp. A row that is all -inf so far has no finite max, and -inf - (-inf)
// would be NaN: there every term is exp(-inf) = 0 whatever is subtracted.
__device__ float Base(float max) { return max == -INFINITY ? 0.0f : max; }

__device__ Partial Merge(const Partial& a, const Partial& b) {
  Partial merged;
  merged.max = fmaxf(a.max, b.max);
  const float base = Base(merged.max);
  merged.sum = a.sum * Exp(a.max - base) + b.sum * Exp(b.max - base);
  merged.total = a.total + b.total;
  return merged;
}

template <bool kTotal, int kCount>
__device__ void Accumulate(Partial& partial, const float (&z)[kCount]) {
  float max = z[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) max = fmaxf(max, z[i]);
  if (max > partial.max) {
    // The first time there is nothing to rescale, and exp(-inf) = 0 keeps it so.
    partial.sum *= Exp(partial.max - Base(max));
    partial.max = max;
  }
  const float base = Base(partial.max);
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // independent chains
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sums[i % 4] += Exp(z[i] - base);
    if (kTotal) partial.total += z[i];
  }
  partial.sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The share of worker `worker` of `workers` in one row.
template <typename T, bool kSoftcap, bool kTotal, int kUnroll>
__device__ Partial AccumulateRow(const T* row, int64_t vocab, int64_t worker, int64_t workers, float softcap) {
  constexpr int kN = kPer16Bytes<T>;
  const float inverse_softcap = kSoftcap ? 1.0f / softcap : 0.0f;
  const Split<T> split(row, vocab);
  const uint4* body = reinterpret_cast<const uint4*>(row + split.head);
  Partial partial = EmptyPartial();

  auto add = [&](const uint4& bits) {
    float z[kN];
    Unpack(bits, z, row);
#pragma unroll
    for (int i = 0; i < kN; ++i) z[i] = Cap<kSoftcap>(z[i], softcap, inverse_softcap);
    Accumulate<kTotal>(partial, z);
  };
  int64_t v = worker;
  for (; v + (kUnroll - 1) * workers < split.vectors; v += kUnroll * workers) {
    uint4 bits[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) bits[u] = LoadStreaming(body + v + u * workers);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) add(bits[u]);
  }
  for (; v < split.vectors; v += workers) add(LoadStreaming(body + v));
  for (int64_t i = worker; i < split.loose; i += workers) {
    const float z[1] = {Cap<kSoftcap>(ToFloat(row[split.ColumnOfLoose(i)]), softcap, inverse_softcap)};
    Accumulate<kTotal>(partial, z);
  }
  return partial;
}

// Merges over groups of kLanes neighbouring lanes; only those named in `lanes` take part.
template <int kLanes>
__device__ Partial MergeLanes(Partial partial, unsigned lanes = 0xffffffffu) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    Partial other;
    other.max = __shfl_xor_sync(lanes, partial.max, distance);
    other.sum = __shfl_xor_sync(lanes, partial.sum, distance);
    other.total = __shfl_xor_sync(lanes, partial.total, distance);
    partial = Merge(partial, other);
  }
  return partial;
}

template <typename T, bool kSoftcap>
__device__ void WriteRow(const Partial& partial, const T* row, int64_t index, int32_t label, int64_t vocab,
                         float softcap, const Statistics& out) {
  const bool here = 0 <= label && label < vocab;
  out.lse[index] = partial.max + logf(partial.sum);
  out.target[index] = here ? Cap<kSoftcap>(ToFloat(row[label]), softcap, 1.0f / softcap) : 0.0f;
  out.total[index] = partial.total;
}

__device__ void WriteIgnored(int64_t index, const Statistics& out) {
  out.lse[index] = 0.0f;
  out.target[index] = 0.0f;
  out.total[index] = 0.0f;
}

template <typename T, bool kSoftcap, bool kTotal, int kLanes>
__global__ void __launch_bounds__(kLaneThreads)
    StatisticsOnLanes(const T* logits, const int32_t* labels, int64_t rows, int64_t vocab, int64_t stride,
                      float softcap, Statistics out) {
  constexpr int kRows = kLaneThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
  // Rows of one warp may end or be ignored at different times: each group shuffles alone.
  const unsigned lanes = (kLanes == kWarp ? 0xffffffffu : (1u << kLanes) - 1u)
                         << (threadIdx.x % kWarp / kLanes * kLanes);
  for (int64_t index = int64_t{blockIdx.x} * kRows + threadIdx.x / kLanes; index < rows;
       index += int64_t{gridDim.x} * kRows) {
    const int32_t label = labels[index];
    if (label == kIgnored) {
      if (lane == 0) WriteIgnored(index, out);
      continue;
    }
    const T* row = logits + index * stride;
    const Partial partial =
        MergeLanes<kLanes>(AccumulateRow<T, kSoftcap, kTotal, kLaneUnroll>(row, vocab, lane, kLanes, softcap), lanes);
    if (lane == 0) WriteRow<T, kSoftcap>(partial, row, index, label, vocab, softcap, out);
  }
}

template <typename T, bool kSoftcap, bool kTotal>
__global__ void __launch_bounds__(kBlockThreads, kBlocksPerMultiprocessor)
    StatisticsOnBlocks(const T* logits, const int32_t* labels, int64_t rows, int64_t vocab, int64_t stride,
                       float softcap, Statistics out) {
  constexpr int kWarps = kBlockThreads / kWarp;
  __shared__ Partial of_warp[kWarps];
  __shared__ Partial of_block[kMaxCluster];  // filled in the cluster's first block only
  cg::cluster_group cluster = cg::this_cluster();
  const int blocks = cluster.num_blocks();
  const int block = cluster.block_rank();
  // The first block's shared memory may be written only once that block has started.
  if (blocks > 1) cluster.sync();

  const int64_t clusters = gridDim.x / blocks;
  for (int64_t index = blockIdx.x / blocks; index < rows; index += clusters) {
    const int32_t label = labels[index];
    if (label == kIgnored) {  // the same for the whole cluster
      if (block == 0 && threadIdx.x == 0) WriteIgnored(index, out);
      continue;
    }
    const T* row = logits + index * stride;
    // Neighbouring threads read neighbouring vectors, and neighbouring blocks neighbouring stretches.
    const int64_t worker = int64_t{block} * kBlockThreads + threadIdx.x;
    const int64_t workers = int64_t{blocks} * kBlockThreads;
    Partial partial =
        MergeLanes<kWarp>(AccumulateRow<T, kSoftcap, kTotal, kBlockUnroll>(row, vocab, worker, workers, softcap));
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = partial;
    __syncthreads();
    if (threadIdx.x < kWarp) {
      partial = MergeLanes<kWarp>(threadIdx.x < kWarps ? of_warp[threadIdx.x] : EmptyPartial());
      if (blocks > 1 && threadIdx.x == 0) cluster.map_shared_rank(of_block, 0)[block] = partial;
    }
    if (blocks > 1) {
      cluster.sync();
      if (block == 0 && threadIdx.x < kWarp) {
        partial = MergeLanes<kWarp>(threadIdx.x < blocks ? of_block[threadIdx.x] : EmptyPartial());
      }
    }
    if (block == 0 && threadIdx.x == 0) WriteRow<T, kSoftcap>(partial, row, index, label, vocab, softcap, out);
    // The next row overwrites both arrays: no thread may still be reading them.
    if (blocks > 1) {
      cluster.sync();
    } else {
      __syncthreads();
    }
  }
}

// ------------------------------------------------------------------------------------------------------ gradient

// The terms of the gradient that all elements of a row share.
struct RowTerms {
  float lse;
  float softmax;  // factor of exp(z - lse)
  float uniform;  // subtracted everywhere
  float target;   // subtracted at the label

  template <bool kSoftcap>
  __device__ float At(float x, bool is_target, float softcap, float inverse_softcap) const {
    const float tanh = kSoftcap ? tanhf(x * inverse_softcap) : 0.0f;
    const float z = kSoftcap ? fminf(__fmul_rn(softcap, tanh), lse) : x;
    float slope = fmaf(softmax, Exp(z - lse), -uniform);
    if (is_target) slope -= target;
    return kSoftcap ? slope * (1.0f - tanh * tanh) : slope;
  }
};

__device__ RowTerms TermsOf(const Gradient& gradient, float lse, float weight) {
  return {lse, weight * fmaf(2.0f * gradient.z_loss, lse, 1.0f), weight * gradient.uniform,
          weight * (1.0f - gradient.label_smoothing)};
}

template <typename T, bool kSoftcap>
__global__ void __launch_bounds__(kGradientThreads)
    GradientOnStretches(const T* logits, const int32_t* labels, int64_t rows, int64_t vocab, int64_t stride,
                        int64_t stretches, float softcap, Gradient gradient) {
  constexpr int kN = kPer16Bytes<T>;
  const float inverse_softcap = kSoftcap ? 1.0f / softcap : 0.0f;
  // blockDim.y rows, a stretch of blockDim.x · kGradientUnroll vectors of each.
  const int64_t rows_per_block = blockDim.y;
  const int64_t groups = (rows + rows_per_block - 1) / rows_per_block;
  for (int64_t item = blockIdx.x; item < groups * stretches; item += gridDim.x) {
    const int64_t index = item / stretches * rows_per_block + threadIdx.y;
    const int64_t stretch = item % stretches;
    if (index >= rows) continue;
    const float weight = gradient.weight[index];
    const RowTerms terms = TermsOf(gradient, gradient.lse[index], weight);
    const int64_t label = labels[index];
    const T* row = logits + index * stride;
    T* out = static_cast<T*>(gradient.out) + index * stride;
    const Split<T> split(row, vocab);
    const uint4* from = reinterpret_cast<const uint4*>(row + split.head);
    uint4* to = reinterpret_cast<uint4*>(out + split.head);

    const int64_t first = stretch * kGradientUnroll * blockDim.x + threadIdx.x;
    uint4 bits[kGradientUnroll];
    if (weight != 0.0f) {
#pragma unroll
      for (int u = 0; u < kGradientUnroll; ++u) {
        if (first + u * blockDim.x < split.vectors) bits[u] = LoadStreaming(from + first + u * blockDim.x);
      }
    }
#pragma unroll
    for (int u = 0; u < kGradientUnroll; ++u) {
      const int64_t v = first + u * blockDim.x;
      if (v >= split.vectors) break;
      if (weight == 0.0f) {
        StoreStreaming(to + v, make_uint4(0, 0, 0, 0));
        continue;
      }
      float x[kN];
      Unpack(bits[u], x, row);
      const int64_t target = label - (split.head + v * kN);
#pragma unroll
      for (int i = 0; i < kN; ++i) x[i] = terms.At<kSoftcap>(x[i], i == target, softcap, inverse_softcap);
      StoreStreaming(to + v, Pack(x, row));
    }
    if (stretch == 0) {
      for (int64_t i = threadIdx.x; i < split.loose; i += blockDim.x) {
        const int64_t c = split.ColumnOfLoose(i);
        const float x =
            weight == 0.0f ? 0.0f : terms.At<kSoftcap>(ToFloat(row[c]), c == label, softcap, inverse_softcap);
        out[c] = FromFloat<T>(x);
      }
      for (int64_t c = vocab + threadIdx.x; c < stride; c += blockDim.x) out[c] = FromFloat<T>(0.0f);
    }
  }
}

// ---------------------------------------------------------------------------------------- statistics and gradient

// A row of 16-byte vectors stays in the shared memory of a cluster, where every thread reads only what it has copied
// there itself. `share` is the number of vectors of a thread block.
template <typename T, bool kSoftcap, bool kTotal>
__global__ void __launch_bounds__(kBothThreads)
    BothOfRow(const T* logits, const int32_t* labels, int64_t vocab, int64_t stride, int share, float softcap,
              Statistics out, Gradient gradient) {
  constexpr int kN = kPer16Bytes<T>;
  constexpr int kWarps = kBothThreads / kWarp;
  extern __shared__ uint4 vectors[];
  __shared__ Partial of_warp[kWarps];
  __shared__ Partial of_block[kMaxCluster];
  cg::cluster_group cluster = cg::this_cluster();
  const int blocks = cluster.num_blocks();
  const int block = cluster.block_rank();
  const int64_t index = blockIdx.x / blocks;
  const int32_t label = labels[index];
  const float weight = gradient.weight[index];
  const T* row = logits + index * stride;
  T* to = static_cast<T*>(gradient.out) + index * stride;
  const int first = block * share;
  const int end = min(first + share, static_cast<int>(stride / kN));
  if (label == kIgnored) {  // the same for the whole cluster
    if (block == 0 && threadIdx.x == 0) WriteIgnored(index, out);
    for (int v = first + threadIdx.x; v < end; v += kBothThreads) {
      StoreStreaming(reinterpret_cast<uint4*>(to) + v, make_uint4(0, 0, 0, 0));
    }
    return;
  }
  for (int v = first + threadIdx.x; v < end; v += kBothThreads) {
    CopyAsync(vectors + (v - first), reinterpret_cast<const uint4*>(row) + v);
  }
  // Before any block writes the gradient over it.
  float target = 0.0f;
  if (block == 0 && threadIdx.x == 0 && 0 <= label && label < vocab) {
    target = Cap<kSoftcap>(ToFloat(row[label]), softcap, 1.0f / softcap);
  }
  CopyAsyncWait();

  const float inverse_softcap = kSoftcap ? 1.0f / softcap : 0.0f;
  Partial partial = EmptyPartial();
  for (int v = first + threadIdx.x; v < end; v += kBothThreads) {
    float z[kN];
    Unpack(vectors[v - first], z, row);
    const int64_t column = int64_t{v} * kN;
    if (column + kN <= vocab) {
#pragma unroll
      for (int i = 0; i < kN; ++i) z[i] = Cap<kSoftcap>(z[i], softcap, inverse_softcap);
      Accumulate<kTotal>(partial, z);
    } else {
      for (int i = 0; i < kN && column + i < vocab; ++i) {
        const float last[1] = {Cap<kSoftcap>(z[i], softcap, inverse_softcap)};
        Accumulate<kTotal>(partial, last);
      }
    }
  }
  partial = MergeLanes<kWarp>(partial);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = partial;
  if (blocks > 1) cluster.sync();  // shared memory may be written only in blocks that have started
  __syncthreads();
  partial = MergeLanes<kWarp>(threadIdx.x % kWarp < kWarps ? of_warp[threadIdx.x % kWarp] : EmptyPartial());
  if (blocks > 1) {
    if (threadIdx.x < blocks) cluster.map_shared_rank(of_block, threadIdx.x)[block] = partial;
    cluster.sync();
    partial = MergeLanes<kWarp>(threadIdx.x % kWarp < blocks ? of_block[threadIdx.x % kWarp] : EmptyPartial());
  }
  const float lse = partial.max + logf(partial.sum);
  if (block == 0 && threadIdx.x == 0) {
    out.lse[index] = lse;
    out.target[index] = target;
    out.total[index] = partial.total;
  }

  const RowTerms terms = TermsOf(gradient, lse, weight);
  for (int v = first + threadIdx.x; v < end; v += kBothThreads) {
    float x[kN];
    Unpack(vectors[v - first], x, row);
    const int64_t column = int64_t{v} * kN;
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const bool counts = weight != 0.0f && column + i < vocab;
      x[i] = counts ? terms.At<kSoftcap>(x[i], column + i == label, softcap, inverse_softcap) : 0.0f;
    }
    StoreStreaming(reinterpret_cast<uint4*>(to) + v, Pack(x, row));
  }
}

// ---------------------------------------------------------------------------------------------- gradient in FP8

// What the quantizing kernel makes of a patch of logits. It reads what rows have in common while logits are on their
// way.
template <bool kSoftcap>
struct GradientOfPatch {
  Gradient gradient;
  const int32_t* labels;
  float softcap;
  int rows, vocab;

  template <typename T>
  struct Of {
    Gradient gradient;
    float softcap;
    int vocab;
    float lse[quantize::kPatch], weight[quantize::kPatch];
    int32_t label[quantize::kPatch];

    __device__ __forceinline__ void operator()(const quantize::Place<T>& place, quantize::Patch<T>& patch) const {
      using W = quantize::Words<T>;
      constexpr int kN = W::kPerVector;
      const float inverse_softcap = kSoftcap ? 1.0f / softcap : 0.0f;
#pragma unroll
      for (int r = 0; r < quantize::kPatch; ++r) {
        const RowTerms terms = TermsOf(gradient, lse[r], weight[r]);
#pragma unroll
        for (int v = 0; v < W::kVectors; ++v) {
          float x[kN];
#pragma unroll
          for (int j = 0; j < kN; ++j) {
            // A row of weight 0 may hold anything.
            const int column = place.Column(v * kN + j);
            const bool counts = column < vocab && weight[r] != 0.0f;
            const float z = quantize::Value<T>(patch[r], v * kN + j);
            x[j] = counts ? terms.template At<kSoftcap>(z, column == label[r], softcap, inverse_softcap) : 0.0f;
          }
          quantize::SetVector<T>(patch, r, v, Pack(x, static_cast<const T*>(nullptr)));
        }
      }
    }
  };

  template <typename T>
  __device__ __forceinline__ Of<T> For(const quantize::Tile&, const quantize::Place<T>& place) const {
    Of<T> of;
    of.gradient = gradient;
    of.softcap = softcap;
    of.vocab = vocab;
#pragma unroll
    for (int r = 0; r < quantize::kPatch; ++r) {
      const int row = place.row + r;
      of.weight[r] = row < rows ? gradient.weight[row] : 0.0f;
      of.lse[r] = row < rows ? gradient.lse[row] : 0.0f;
      of.label[r] = row < rows ? labels[row] : kIgnored;
    }
    return of;
  }
};

// -------------------------------------------------------------------------------------------------------- launch

// The most thread blocks of a cluster on this GPU.
Status MostOfCluster(int* most) {
  bool has = false;
  Status status = HasClusters(&has);
  *most = has ? kMaxCluster : 1;
  return status;
}

// Blocks per row: one while the rows alone fill every SM, else more, as long as every thread has at least one full
// round of loads.
int ClusterSize(int64_t rows, int64_t vectors_per_row, int multiprocessors, int most) {
  int blocks = 1;
  while (blocks < most && rows * blocks < kBlocksPerMultiprocessor * int64_t{multiprocessors} &&
         vectors_per_row >= int64_t{2} * blocks * kBlockUnroll * kBlockThreads) {
    blocks *= 2;
  }
  return blocks;
}

template <typename... Parameters, typename... Arguments>
Status Launch(cudaStream_t stream, void (*kernel)(Parameters...), int64_t blocks, dim3 threads, int cluster,
              int dynamic_bytes, Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  // Kernels loop over what does not fit into one grid.
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(blocks, INT_MAX / cluster * cluster)));
  config.blockDim = threads;
  config.dynamicSmemBytes = dynamic_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return Check(cudaLaunchKernelEx(&config, kernel, arguments...), "kernel launch");
}

template <typename T, bool kSoftcap, bool kTotal>
Status LaunchStatistics(cudaStream_t stream, const Logits& logits, Statistics out) {
  const T* data = static_cast<const T*>(logits.data);
  const int64_t vectors = logits.vocab / kPer16Bytes<T>;
  auto on_lanes = [&](auto* kernel, int lanes) {
    const int64_t rows_per_block = kLaneThreads / lanes;
    return Launch(stream, kernel, (logits.rows + rows_per_block - 1) / rows_per_block, dim3(kLaneThreads), 1, 0, data,
                  logits.labels, logits.rows, logits.vocab, logits.stride, logits.softcap, out);
  };
  if (vectors <= 8 * kLaneUnroll) return on_lanes(StatisticsOnLanes<T, kSoftcap, kTotal, 8>, 8);
  if (vectors <= 4 * kWarp * kLaneUnroll) return on_lanes(StatisticsOnLanes<T, kSoftcap, kTotal, kWarp>, kWarp);

  int multiprocessors = 0, most = 0;
  if (Status s = CountMultiprocessors(&multiprocessors); !s.ok()) return s;
  if (Status s = MostOfCluster(&most); !s.ok()) return s;
  const int cluster = ClusterSize(logits.rows, vectors, multiprocessors, most);
  return Launch(stream, StatisticsOnBlocks<T, kSoftcap, kTotal>, logits.rows * cluster, dim3(kBlockThreads), cluster, 0,
                data, logits.labels, logits.rows, logits.vocab, logits.stride, logits.softcap, out);
}

template <typename T>
Status SelectStatistics(cudaStream_t stream, const Logits& logits, bool with_total, Statistics out) {
  const bool capped = logits.softcap > 0.0f;
  auto* launch = capped ? (with_total ? LaunchStatistics<T, true, true> : LaunchStatistics<T, true, false>)
                        : (with_total ? LaunchStatistics<T, false, true> : LaunchStatistics<T, false, false>);
  return launch(stream, logits, out);
}

template <typename T>
Status LaunchGradient(cudaStream_t stream, const Logits& logits, const Gradient& gradient) {
  const int64_t vectors = std::max<int64_t>(1, logits.vocab / kPer16Bytes<T>);
  // A short row takes as many threads as it has vectors, a power of two from 8 up; the rest take further rows.
  unsigned width = 8;
  while (width < kGradientThreads && width * kGradientUnroll < vectors) width *= 2;
  const dim3 threads(width, width >= 256 ? 1 : 256 / width);
  const int64_t stretches = (vectors + width * kGradientUnroll - 1) / (width * kGradientUnroll);
  const int64_t blocks = (logits.rows + threads.y - 1) / threads.y * stretches;
  auto* kernel = logits.softcap > 0.0f ? GradientOnStretches<T, true> : GradientOnStretches<T, false>;
  return Launch(stream, kernel, blocks, threads, 1, 0, static_cast<const T*>(logits.data), logits.labels, logits.rows,
                logits.vocab, logits.stride, stretches, logits.softcap, gradient);
}

// The shared memory of BothOfRow beside the row.
constexpr int kBothPartials = (kBothThreads / kWarp + kMaxCluster) * sizeof(Partial);

// How a row lies in the shared memory of a cluster: `share` vectors in each of `blocks`; no blocks where it does not
// fit. `most_bytes` is what a block may have of it.
struct RowInCluster {
  int blocks = 0;
  int share = 0;
  int most_bytes = 0;
};

Status FindCluster(const Logits& logits, const Gradient& gradient, RowInCluster* found) {
  const int64_t bytes = logits.stride * (logits.dtype == DType::kFloat32 ? 4 : 2);
  if (bytes % 16 != 0 || !OnSixteenBytes(logits.data) || !OnSixteenBytes(gradient.out)) return Status::Ok();
  int most_blocks = 0, most_bytes = 0;
  if (Status s = MostOfCluster(&most_blocks); !s.ok()) return s;
  if (Status s = CountSharedBytes(&most_bytes); !s.ok()) return s;
  most_bytes = std::min(most_bytes - kBothPartials, kMostBothBytes);
  int blocks = 1;
  while (blocks < most_blocks && bytes > int64_t{blocks} * kBothBytes) blocks *= 2;
  const int64_t share = (bytes / 16 + blocks - 1) / blocks;
  if (share * 16 > most_bytes || logits.rows > INT_MAX / kMaxCluster) return Status::Ok();
  *found = {blocks, static_cast<int>(share), most_bytes};
  return Status::Ok();
}

template <typename T, bool kSoftcap, bool kTotal>
Status LaunchBoth(cudaStream_t stream, const Logits& logits, const RowInCluster& in, Statistics out,
                  const Gradient& gradient) {
  auto* kernel = BothOfRow<T, kSoftcap, kTotal>;
  TE_JAX_TRY((SetAttributesOnce<BothOfRow<T, kSoftcap, kTotal>>(
      {{cudaFuncAttributeMaxDynamicSharedMemorySize, in.most_bytes}})));
  return Launch(stream, kernel, logits.rows * in.blocks, dim3(kBothThreads), in.blocks, in.share * 16,
                static_cast<const T*>(logits.data), logits.labels, logits.vocab, logits.stride, in.share,
                logits.softcap, out, gradient);
}

template <typename T>
Status SelectBoth(cudaStream_t stream, const Logits& logits, bool with_total, const RowInCluster& in, Statistics out,
                  const Gradient& gradient) {
  const bool capped = logits.softcap > 0.0f;
  auto* launch = capped ? (with_total ? LaunchBoth<T, true, true> : LaunchBoth<T, true, false>)
                        : (with_total ? LaunchBoth<T, false, true> : LaunchBoth<T, false, false>);
  return launch(stream, logits, in, out, gradient);
}

}  // namespace

Status ComputeStatistics(const Executor& executor, const Logits& logits, bool with_total, Statistics out) {
  if (logits.rows == 0) return Status::Ok();
  auto* select = logits.dtype == DType::kFloat32 ? SelectStatistics<float> : SelectStatistics<__nv_bfloat16>;
  return select(executor.stream, logits, with_total, out);
}

Status ComputeGradient(const Executor& executor, const Logits& logits, const Gradient& gradient) {
  if (logits.rows == 0) return Status::Ok();
  if (reinterpret_cast<uintptr_t>(logits.data) % 16 != reinterpret_cast<uintptr_t>(gradient.out) % 16) {
    return Status::Failed("logits and gradient must have the same alignment to 16 bytes");
  }
  auto* launch = logits.dtype == DType::kFloat32 ? LaunchGradient<float> : LaunchGradient<__nv_bfloat16>;
  return launch(executor.stream, logits, gradient);
}

Status ComputeBoth(const Executor& executor, const Logits& logits, bool with_total, Statistics statistics,
                   const Gradient& gradient) {
  if (logits.rows == 0) return Status::Ok();
  RowInCluster in;
  if (Status s = FindCluster(logits, gradient, &in); !s.ok()) return s;
  if (in.blocks == 0) {
    if (Status s = ComputeStatistics(executor, logits, with_total, statistics); !s.ok()) return s;
    return ComputeGradient(executor, logits, gradient);
  }
  auto* select = logits.dtype == DType::kFloat32 ? SelectBoth<float> : SelectBoth<__nv_bfloat16>;
  return select(executor.stream, logits, with_total, in, statistics, gradient);
}

Status QuantizeGradient(const Executor& executor, const Logits& logits, const Gradient& gradient,
                        const quantize::Copies& copies, const quantize::BlockScaling& scaling) {
  const quantize::Matrices x{logits.dtype, logits.data, 1, logits.rows, logits.stride};
  const int rows = static_cast<int>(logits.rows), vocab = static_cast<int>(logits.vocab);
  if (logits.softcap > 0.0f) {
    const GradientOfPatch<true> compute{gradient, logits.labels, logits.softcap, rows, vocab};
    return quantize::LaunchQuantizeBlocks(executor.stream, x, copies, scaling, compute);
  }
  const GradientOfPatch<false> compute{gradient, logits.labels, logits.softcap, rows, vocab};
  return quantize::LaunchQuantizeBlocks(executor.stream, x, copies, scaling, compute);
}

}  // namespace te::softmax_cross_entropy
