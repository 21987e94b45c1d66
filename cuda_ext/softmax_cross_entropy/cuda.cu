// Row statistics by online softmax: one read of the logits, three floats written per row.
//
// Bytes per logit: its own size. On an H200 (4.3 TB/s measured) 8192 × 128256 bfloat16 cannot take less than 0.49 ms.
// Per logit: one MUFU.EX2 (16 a clock and SM) and about five FP32 instructions (128 a clock and SM), 60% and 40% of
// that time, so the loads must run ahead of the arithmetic: every thread keeps kUnroll 16-byte loads in flight.
//
// A row belongs to one warp (short rows), one thread block, or a cluster of thread blocks that merge through
// distributed shared memory (long rows, too few of them to fill the GPU).

#include <cooperative_groups.h>

#include <algorithm>
#include <climits>

#include "common/vector.cuh"
#include "softmax_cross_entropy/softmax_cross_entropy.h"

namespace te::softmax_cross_entropy {
namespace {

namespace cg = cooperative_groups;

constexpr int kBlockThreads = 512;
constexpr int kUnroll = 4;
constexpr int kWarp = 32;
constexpr int kMaxCluster = 8;  // the largest size that every Hopper GPU can schedule
constexpr float kLog2E = 1.4426950408889634f;

__device__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Running max and Σ exp(z - max), with Σ z beside them.
struct Partial {
  float max = -INFINITY;
  float sum = 0.0f;
  float total = 0.0f;
};

// -max in log2 units, for exp(z - max) = 2^(z·log2e + offset). A row that is all -inf so far has no finite max, and
// -inf - (-inf) would be NaN: there every term is exp(-inf) = 0 with any finite offset.
__device__ float Offset(float max) { return max == -INFINITY ? 0.0f : -max * kLog2E; }

__device__ Partial Merge(const Partial& a, const Partial& b) {
  Partial merged;
  merged.max = fmaxf(a.max, b.max);
  const float offset = Offset(merged.max);
  merged.sum = a.sum * Exp2(fmaf(a.max, kLog2E, offset)) + b.sum * Exp2(fmaf(b.max, kLog2E, offset));
  merged.total = a.total + b.total;
  return merged;
}

template <bool kSoftcap>
__device__ float Cap(float x, float softcap, float inverse_softcap) {
  return kSoftcap ? softcap * tanhf(x * inverse_softcap) : x;
}

template <bool kTotal, int kCount>
__device__ void Accumulate(Partial& partial, const float (&z)[kCount]) {
  float max = z[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) max = fmaxf(max, z[i]);
  if (max > partial.max) {
    // The first time there is nothing to rescale, and exp2(-inf) = 0 keeps it so.
    partial.sum *= Exp2(fmaf(partial.max, kLog2E, Offset(max)));
    partial.max = max;
  }
  const float offset = Offset(partial.max);
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // independent chains
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sums[i % 4] += Exp2(fmaf(z[i], kLog2E, offset));
    if (kTotal) partial.total += z[i];
  }
  partial.sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The share of worker `worker` of `workers` in one row: whole 16-byte vectors in the middle, single elements at the
// ends, where the row does not start or stop on a 16-byte boundary.
template <typename T, bool kSoftcap, bool kTotal>
__device__ Partial AccumulateRow(const T* row, int64_t vocab, int64_t worker, int64_t workers, float softcap) {
  constexpr int kN = kPer16Bytes<T>;
  const float inverse_softcap = kSoftcap ? 1.0f / softcap : 0.0f;
  const int64_t misaligned = (reinterpret_cast<uintptr_t>(row) % 16) / sizeof(T);
  const int64_t head = min(vocab, misaligned == 0 ? int64_t{0} : kN - misaligned);
  const int64_t vectors = (vocab - head) / kN;
  const uint4* body = reinterpret_cast<const uint4*>(row + head);

  Partial partial;
  int64_t v = worker;
  for (; v + (kUnroll - 1) * workers < vectors; v += kUnroll * workers) {
    uint4 bits[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) bits[u] = LoadStreaming(body + v + u * workers);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float z[kN];
      Unpack(bits[u], z, row);
#pragma unroll
      for (int i = 0; i < kN; ++i) z[i] = Cap<kSoftcap>(z[i], softcap, inverse_softcap);
      Accumulate<kTotal>(partial, z);
    }
  }
  for (; v < vectors; v += workers) {
    float z[kN];
    Unpack(LoadStreaming(body + v), z, row);
#pragma unroll
    for (int i = 0; i < kN; ++i) z[i] = Cap<kSoftcap>(z[i], softcap, inverse_softcap);
    Accumulate<kTotal>(partial, z);
  }
  const int64_t tail = head + vectors * kN;
  const int64_t loose = head + (vocab - tail);  // fewer than 2·kN elements
  for (int64_t i = worker; i < loose; i += workers) {
    const int64_t column = i < head ? i : tail + (i - head);
    const float z[1] = {Cap<kSoftcap>(ToFloat(row[column]), softcap, inverse_softcap)};
    Accumulate<kTotal>(partial, z);
  }
  return partial;
}

__device__ Partial MergeWarp(Partial partial) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    Partial other;
    other.max = __shfl_xor_sync(0xffffffffu, partial.max, lanes);
    other.sum = __shfl_xor_sync(0xffffffffu, partial.sum, lanes);
    other.total = __shfl_xor_sync(0xffffffffu, partial.total, lanes);
    partial = Merge(partial, other);
  }
  return partial;
}

template <typename T, bool kSoftcap, bool kTotal>
__device__ void WriteRow(const Partial& partial, const T* row, int64_t index, int32_t label, int64_t vocab,
                         float softcap, const Statistics& out) {
  out.lse[index] = partial.max + logf(partial.sum);
  out.target[index] = 0 <= label && label < vocab ? Cap<kSoftcap>(ToFloat(row[label]), softcap, 1.0f / softcap) : 0.0f;
  out.total[index] = partial.total;
}

__device__ void WriteIgnored(int64_t index, const Statistics& out) {
  out.lse[index] = 0.0f;
  out.target[index] = 0.0f;
  out.total[index] = 0.0f;
}

template <typename T, bool kSoftcap, bool kTotal>
__global__ void __launch_bounds__(kBlockThreads)
    WarpPerRow(const T* logits, const int32_t* labels, int64_t rows, int64_t vocab, float softcap, Statistics out) {
  constexpr int kRows = kBlockThreads / kWarp;
  const int lane = threadIdx.x % kWarp;
  for (int64_t index = int64_t{blockIdx.x} * kRows + threadIdx.x / kWarp; index < rows;
       index += int64_t{gridDim.x} * kRows) {
    const int32_t label = labels[index];
    if (label == kIgnored) {
      if (lane == 0) WriteIgnored(index, out);
      continue;
    }
    const T* row = logits + index * vocab;
    const Partial partial = MergeWarp(AccumulateRow<T, kSoftcap, kTotal>(row, vocab, lane, kWarp, softcap));
    if (lane == 0) WriteRow<T, kSoftcap, kTotal>(partial, row, index, label, vocab, softcap, out);
  }
}

template <typename T, bool kSoftcap, bool kTotal>
__global__ void __launch_bounds__(kBlockThreads)
    ClusterPerRow(const T* logits, const int32_t* labels, int64_t rows, int64_t vocab, float softcap, Statistics out) {
  constexpr int kWarps = kBlockThreads / kWarp;
  __shared__ Partial of_warp[kWarps];
  __shared__ Partial of_block[kMaxCluster];  // filled in the cluster's first block only
  cg::cluster_group cluster = cg::this_cluster();
  const int blocks = cluster.num_blocks();
  const int block = cluster.block_rank();

  const int64_t clusters = gridDim.x / blocks;
  for (int64_t index = blockIdx.x / blocks; index < rows; index += clusters) {
    const int32_t label = labels[index];
    if (label == kIgnored) {  // the same for the whole cluster
      if (block == 0 && threadIdx.x == 0) WriteIgnored(index, out);
      continue;
    }
    const T* row = logits + index * vocab;
    // Neighbouring threads read neighbouring vectors, and neighbouring blocks neighbouring stretches of 8 KB.
    const int64_t worker = int64_t{block} * kBlockThreads + threadIdx.x;
    Partial partial =
        MergeWarp(AccumulateRow<T, kSoftcap, kTotal>(row, vocab, worker, int64_t{blocks} * kBlockThreads, softcap));
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = partial;
    __syncthreads();
    if (threadIdx.x < kWarp) {
      partial = MergeWarp(threadIdx.x < kWarps ? of_warp[threadIdx.x] : Partial{});
      if (blocks > 1 && threadIdx.x == 0) cluster.map_shared_rank(of_block, 0)[block] = partial;
    }
    if (blocks > 1) {
      cluster.sync();
      if (block == 0 && threadIdx.x < kWarp) {
        partial = MergeWarp(threadIdx.x < blocks ? of_block[threadIdx.x] : Partial{});
      }
    }
    if (block == 0 && threadIdx.x == 0) {
      WriteRow<T, kSoftcap, kTotal>(partial, row, index, label, vocab, softcap, out);
    }
    // The next row overwrites both arrays: nobody may still be reading them.
    if (blocks > 1) {
      cluster.sync();
    } else {
      __syncthreads();
    }
  }
}

Status Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status::Ok();
  return Status::Failed(std::string(what) + ": " + cudaGetErrorString(error));
}

// Blocks per row: one while the rows alone fill the GPU four times over (a block keeps 32 KB in flight, enough for an
// SM's share of the bandwidth), else enough to do so, but never less than two rounds of loads for a thread.
int ClusterSize(int64_t rows, int64_t vectors_per_row, int multiprocessors) {
  int blocks = 1;
  while (blocks < kMaxCluster && rows * blocks < 4 * int64_t{multiprocessors} &&
         vectors_per_row >= int64_t{4} * blocks * kUnroll * kBlockThreads) {
    blocks *= 2;
  }
  return blocks;
}

template <typename T, bool kSoftcap, bool kTotal>
Status Launch(cudaStream_t stream, const void* logits, const int32_t* labels, int64_t rows, int64_t vocab,
              float softcap, Statistics out) {
  int device = 0, multiprocessors = 0;
  if (Status s = Check(cudaGetDevice(&device), "cudaGetDevice"); !s.ok()) return s;
  if (Status s = Check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
                       "cudaDeviceGetAttribute");
      !s.ok()) {
    return s;
  }
  const int64_t vectors = vocab / kPer16Bytes<T>;
  const bool warp_per_row = vectors <= 4 * kUnroll * kWarp;
  const int64_t rows_per_block = kBlockThreads / kWarp;
  const int cluster = warp_per_row ? 1 : ClusterSize(rows, vectors, multiprocessors);
  const int64_t blocks = warp_per_row ? (rows + rows_per_block - 1) / rows_per_block : rows * cluster;

  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(blocks, INT_MAX / cluster * cluster)));
  config.blockDim = dim3(kBlockThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  auto* kernel = warp_per_row ? WarpPerRow<T, kSoftcap, kTotal> : ClusterPerRow<T, kSoftcap, kTotal>;
  return Check(cudaLaunchKernelEx(&config, kernel, static_cast<const T*>(logits), labels, rows, vocab, softcap, out),
               "kernel launch");
}

template <typename T>
Status Select(cudaStream_t stream, const void* logits, const int32_t* labels, int64_t rows, int64_t vocab,
              float softcap, bool with_total, Statistics out) {
  const bool capped = softcap > 0.0f;
  auto* launch = capped ? (with_total ? Launch<T, true, true> : Launch<T, true, false>)
                        : (with_total ? Launch<T, false, true> : Launch<T, false, false>);
  return launch(stream, logits, labels, rows, vocab, softcap, out);
}

}  // namespace

Status Compute(const Executor& executor, DType dtype, const void* logits, const int32_t* labels, int64_t rows,
               int64_t vocab, float softcap, bool with_total, Statistics out) {
  if (rows == 0) return Status::Ok();
  auto* select = dtype == DType::kFloat32    ? Select<float>
                 : dtype == DType::kBFloat16 ? Select<__nv_bfloat16>
                                             : Select<__half>;
  return select(executor.stream, logits, labels, rows, vocab, softcap, with_total, out);
}

}  // namespace te::softmax_cross_entropy
