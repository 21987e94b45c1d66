// Statistics and gradient at once: one read and one write, with the row in the shared memory of a cluster in between;
// rows that do not fit there take both passes.
//
// Bytes per logit: twice its size. On an H200 (4.3 TB/s measured) 8192 × 128256 bfloat16 cannot take less than 0.98 ms.

#include <cooperative_groups.h>

#include <algorithm>
#include <climits>
#include <cstdint>

#include "common/block_limits.h"
#include "common/copy_async.cuh"
#include "common/cuda_status.h"
#include "common/vector.cuh"
#include "softmax_cross_entropy/cluster_launch.cuh"
#include "softmax_cross_entropy/online_softmax.cuh"
#include "softmax_cross_entropy/row.cuh"
#include "softmax_cross_entropy/row_gradient.cuh"
#include "softmax_cross_entropy/softmax_cross_entropy.h"

namespace te::softmax_cross_entropy {
namespace {

namespace cg = cooperative_groups;

constexpr int kBothThreads = 256;
constexpr int kBothBytes = 72 << 10;       // of a row in a block's shared memory: three blocks a multiprocessor
constexpr int kMostBothBytes = 220 << 10;  // where clusters of kMaxCluster blocks need more, if the GPU has them

// A row of 16-byte vectors stays in the shared memory of a cluster, where every thread reads only what it has copied
// there itself. `share` is the number of vectors of a thread block.
template <typename T, bool kSoftcap, bool kTotal>
__global__ void __launch_bounds__(kBothThreads)
    BothOfRow(const T* logits, const int32_t* labels, int64_t vocab, int64_t stride, int share, float softcap,
              Statistics out, Gradient gradient) {
  constexpr int kN = kPer16Bytes<T>;
  constexpr int kWarps = kBothThreads / kWarp;
  extern __shared__ __align__(1024) uint4 vectors[];  // as when sizes were measured; 16 bytes would do
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

}  // namespace te::softmax_cross_entropy
