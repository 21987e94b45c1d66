// Statistics: one read of the logits by online softmax, three floats written for each row.
//
// Bytes per logit: its size. On an H200 (4.3 TB/s measured) 8192 × 128256 bfloat16 cannot take less than 0.49 ms. Per
// logit: one MUFU.EX2 (16 a clock and SM) and six to nine FP32 instructions (128 a clock and SM), 60% and 50% of the
// time, so loads must run ahead of the arithmetic: every thread keeps kLaneUnroll or kBlockUnroll 16-byte loads in
// flight. Sizes were tuned on an H200 (docs/measurements.md).
//
// A row belongs to a few lanes (short rows), to one thread block, or to a cluster of thread blocks that merge through
// distributed shared memory (long rows, too few of them to fill the GPU).

#include <cooperative_groups.h>

#include <cstdint>

#include "common/cuda_status.h"
#include "common/vector.cuh"
#include "softmax_cross_entropy/cluster_launch.cuh"
#include "softmax_cross_entropy/online_softmax.cuh"
#include "softmax_cross_entropy/row.cuh"
#include "softmax_cross_entropy/softmax_cross_entropy.h"

namespace te::softmax_cross_entropy {
namespace {

namespace cg = cooperative_groups;

constexpr int kLaneUnroll = 4;               // rows on lanes
constexpr int kLaneThreads = 256;            // threads of a block then
constexpr int kBlockUnroll = 8;              // rows on blocks
constexpr int kBlockThreads = 128;           // threads of a block then
constexpr int kBlocksPerMultiprocessor = 8;  // bounds the registers: a row's end idles one block in eight

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

template <typename T, bool kSoftcap>
__device__ void WriteRow(const Partial& partial, const T* row, int64_t index, int32_t label, int64_t vocab,
                         float softcap, const Statistics& out) {
  const bool here = 0 <= label && label < vocab;
  out.lse[index] = partial.max + logf(partial.sum);
  out.target[index] = here ? Cap<kSoftcap>(ToFloat(row[label]), softcap, 1.0f / softcap) : 0.0f;
  out.total[index] = partial.total;
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

}  // namespace

Status ComputeStatistics(const Executor& executor, const Logits& logits, bool with_total, Statistics out) {
  if (logits.rows == 0) return Status::Ok();
  auto* select = logits.dtype == DType::kFloat32 ? SelectStatistics<float> : SelectStatistics<__nv_bfloat16>;
  return select(executor.stream, logits, with_total, out);
}

}  // namespace te::softmax_cross_entropy
