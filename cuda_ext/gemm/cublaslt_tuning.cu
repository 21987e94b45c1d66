// The operands are random and roughly normal, as in training: tensor cores draw less power on zeros and then run at
// higher clocks, which would favour other algorithms. Scratch memory is allocated and freed in the order of the tuning
// stream, so that nobody else's work is waited for.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "common/cuda_status.h"
#include "common/fp8.h"
#include "common/vector.cuh"
#include "gemm/cublaslt_tuning.h"

namespace te::gemm::cublaslt {
namespace {

constexpr int kRounds = 5;
constexpr float kSampleMilliseconds = 0.2f;  // long enough for the clock's resolution of half a microsecond
constexpr int kMostCalls = 50;
// Under a load that lasts power limits the clocks, and what is fastest at full clocks need not be at what they then
// are. So the best of the short samples, this close to the fastest, are compared again after some time of it.
constexpr float kContender = 1.12f;
constexpr size_t kMostContenders = 6;
constexpr float kHeatingMilliseconds = 150.0f;
constexpr float kSustainedMilliseconds = 12.0f;
constexpr float kShortestSustained = 0.04f;  // shorter products do not heat anything
constexpr int kSustainedRounds = 3;
// cuBLASLt's own favourite stays unless another one is faster by more than the noise.
constexpr float kWorthwhile = 0.985f;
constexpr float kFp8Scale = 64.0f;  // maps four standard deviations to 256

__device__ uint32_t Mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// A sum of four uniform bytes, of mean 0 and variance 1.
__device__ float RoughlyNormal(uint32_t index, uint32_t seed) {
  const uint32_t bits = Mix(index * 0x9e3779b9u + seed);
  const int sum = (bits & 0xff) + (bits >> 8 & 0xff) + (bits >> 16 & 0xff) + (bits >> 24);
  return static_cast<float>(sum - 510) * (1.0f / 147.8f);
}

template <typename T>
__global__ void FillPlain(T* out, int64_t count, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    out[i] = FromFloat<T>(RoughlyNormal(static_cast<uint32_t>(i), seed));
  }
}

template <typename F>
__global__ void FillFp8(uint8_t* out, int64_t count, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    out[i] = EncodeFp8<F>(RoughlyNormal(static_cast<uint32_t>(i), seed), kFp8Scale);
  }
}

__global__ void FillScales(float* inverse_scales, int64_t count) {
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) inverse_scales[i] = 1.0f / kFp8Scale;
}

void Fill(Type type, void* out, int64_t count, uint32_t seed, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(std::clamp<int64_t>((count + 255) / 256, 1, 4096));
  switch (type) {
    case Type::kFloat32:
      FillPlain<<<blocks, 256, 0, stream>>>(static_cast<float*>(out), count, seed);
      break;
    case Type::kBFloat16:
      FillPlain<<<blocks, 256, 0, stream>>>(static_cast<__nv_bfloat16*>(out), count, seed);
      break;
    case Type::kFloat16:
      FillPlain<<<blocks, 256, 0, stream>>>(static_cast<__half*>(out), count, seed);
      break;
    case Type::kE4M3:
      FillFp8<E4M3><<<blocks, 256, 0, stream>>>(static_cast<uint8_t*>(out), count, seed);
      break;
    case Type::kE5M2:
      FillFp8<E5M2><<<blocks, 256, 0, stream>>>(static_cast<uint8_t*>(out), count, seed);
      break;
  }
}

struct Destroy {
  void operator()(CUevent_st* event) const { cudaEventDestroy(event); }
  void operator()(CUstream_st* stream) const {
    cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
  }
};
using Event = std::unique_ptr<CUevent_st, Destroy>;
using Stream = std::unique_ptr<CUstream_st, Destroy>;

// Null where CUDA has none left; uses of it then fail.
Event MakeEvent() {
  cudaEvent_t event = nullptr;
  return Event(cudaEventCreate(&event) == cudaSuccess ? event : nullptr);
}

Stream MakeStream() {
  cudaStream_t stream = nullptr;
  return Stream(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess ? stream : nullptr);
}

// Once: where one product finds no memory, others will not.
void ReportNoMemory(int64_t bytes) {
  static std::atomic_flag reported;
  if (reported.test_and_set()) return;
  std::fprintf(
      stderr,
      "te_jax: the %lld MiB to time a GEMM's candidates in are not free on the GPU: cuBLASLt's first suggestion "
      "is taken, here and wherever memory lacks. XLA_PYTHON_CLIENT_MEM_FRACTION leaves more; with "
      "TE_JAX_AUTOTUNE=0 nothing is timed.\n",
      static_cast<long long>((bytes >> 20) + 1));
}

// Memory for the operands and results of one product.
class Scratch {
 public:
  Scratch(const Key& key, cudaStream_t stream) : stream_(stream) {
    const int64_t d_size = SizeOf(key.d_type);
    const int64_t results = (key.batch - 1) * key.d_stride + key.m * key.n;
    const int64_t a_values = (key.batch - 1) * key.a_stride + key.m * key.k;
    const int64_t b_values = (key.batch - 1) * key.b_stride + key.n * key.k;
    const int64_t bias_values = (key.batch - 1) * key.bias_stride + key.n;
    int64_t offset = 0;
    auto reserve = [&](int64_t bytes) {
      const int64_t begin = offset;
      offset += (bytes + 255) / 256 * 256;
      return begin;
    };
    const int64_t a = reserve(a_values * SizeOf(key.a_type)), b = reserve(b_values * SizeOf(key.b_type));
    const int64_t d = reserve(results * d_size), bias = reserve(key.bias ? bias_values * d_size : 0);
    const int64_t preactivation = reserve(key.preactivation ? results * d_size : 0);
    const int64_t scales = key.row_scales ? std::max(key.m, key.n) : 1;
    const int64_t inverse_scale = reserve(4 * scales);
    const int64_t workspace = reserve(key.workspace_bytes);
    if (cudaMallocAsync(&memory_, offset, stream) != cudaSuccess) {
      memory_ = nullptr;
      ReportNoMemory(offset);
      return;
    }
    char* base = static_cast<char*>(memory_);
    auto* const inverse_scales = reinterpret_cast<float*>(base + inverse_scale);
    arrays_ = {base + a,
               base + b,
               base + d,
               key.bias ? base + bias : nullptr,
               key.preactivation ? base + preactivation : nullptr,
               base + d,
               inverse_scales,
               inverse_scales,
               base + workspace};
    Fill(key.a_type, base + a, a_values, 1, stream);
    Fill(key.b_type, base + b, b_values, 2, stream);
    Fill(key.d_type, base + d, results, 3, stream);
    if (key.bias) Fill(key.d_type, base + bias, bias_values, 4, stream);
    FillScales<<<1, 1024, 0, stream>>>(inverse_scales, scales);
    filled_ = cudaGetLastError() == cudaSuccess;
  }
  ~Scratch() {
    if (memory_ != nullptr) cudaFreeAsync(memory_, stream_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  bool ready() const { return filled_; }
  const Arrays& arrays() const { return arrays_; }

 private:
  cudaStream_t stream_;
  void* memory_ = nullptr;
  bool filled_ = false;
  Arrays arrays_{};
};

struct Candidate {
  explicit Candidate(Choice choice) : choice(choice) {}

  Choice choice;
  Event begin = MakeEvent();
  Event end = MakeEvent();
  std::vector<float> milliseconds;
};

float Median(const Candidate& candidate) {
  std::vector<float> sorted = candidate.milliseconds;
  std::sort(sorted.begin(), sorted.end());
  return sorted[sorted.size() / 2];
}

// Runs every candidate once, one after another, and appends what each took. Those that fail are dropped.
void MeasureRound(cublasLtHandle_t handle, const std::vector<std::unique_ptr<Plan>>& plans, const Arrays& arrays,
                  int calls, cudaStream_t stream, std::vector<Candidate>& candidates) {
  std::erase_if(candidates, [&](Candidate& candidate) {
    bool fine = cudaEventRecord(candidate.begin.get(), stream) == cudaSuccess;
    for (int call = 0; fine && call < calls; ++call) {
      fine = plans[candidate.choice.plan]->Launch(handle, arrays, candidate.choice.algorithm, stream).ok();
    }
    return !fine || cudaEventRecord(candidate.end.get(), stream) != cudaSuccess;
  });
  if (cudaStreamSynchronize(stream) != cudaSuccess) candidates.clear();
  for (Candidate& candidate : candidates) {
    float milliseconds = std::numeric_limits<float>::infinity();
    cudaEventElapsedTime(&milliseconds, candidate.begin.get(), candidate.end.get());
    candidate.milliseconds.push_back(milliseconds / static_cast<float>(calls));
  }
}

// cuBLASLt's own favourite.
bool IsFirst(const Candidate& candidate) { return candidate.choice.plan == 0 && candidate.choice.algorithm == 0; }

}  // namespace

Choice FastestAlgorithm(cublasLtHandle_t handle, const std::vector<std::unique_ptr<Plan>>& plans) {
  size_t algorithms = 0;
  for (const auto& plan : plans) algorithms += plan->algorithms();
  Choice fastest;
  if (algorithms < 2) return fastest;
  const RelaxedCapture relaxed;  // other threads may be recording graphs, which allocations here must not disturb
  if (const Stream stream = MakeStream()) {
    const Scratch scratch(plans.front()->key(), stream.get());
    std::vector<Candidate> candidates;
    for (size_t plan = 0; scratch.ready() && plan < plans.size(); ++plan) {
      for (size_t i = 0; i < plans[plan]->algorithms(); ++i) candidates.emplace_back(Choice{plan, i});
    }
    auto measure = [&](int calls) { MeasureRound(handle, plans, scratch.arrays(), calls, stream.get(), candidates); };
    auto forget = [&] {
      for (Candidate& candidate : candidates) candidate.milliseconds.clear();
    };

    measure(1);  // loads kernels
    measure(1);
    float shortest = kSampleMilliseconds;
    for (const Candidate& candidate : candidates) shortest = std::min(shortest, candidate.milliseconds.back());
    forget();
    const int calls = std::clamp(static_cast<int>(kSampleMilliseconds / std::max(shortest, 1e-3f)), 1, kMostCalls);
    for (int round = 0; round < kRounds; ++round) measure(calls);

    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& a, const Candidate& b) { return Median(a) < Median(b); });
    if (candidates.size() > 1 && Median(candidates.front()) > kShortestSustained) {
      const float least = Median(candidates.front());
      size_t rank = 0;
      std::erase_if(candidates, [&](const Candidate& candidate) {
        return !IsFirst(candidate) && (++rank > kMostContenders || Median(candidate) > kContender * least);
      });
      const int sustained = std::max(1, static_cast<int>(kSustainedMilliseconds / least));
      for (float heated = 0.0f; heated < kHeatingMilliseconds && !candidates.empty();
           heated += kSustainedMilliseconds * static_cast<float>(candidates.size())) {
        measure(sustained);
      }
      forget();
      for (int round = 0; round < kSustainedRounds; ++round) measure(sustained);
    }

    float shortest_median = std::numeric_limits<float>::infinity(), first_median = shortest_median;
    for (const Candidate& candidate : candidates) {
      const float median = Median(candidate);
      if (IsFirst(candidate)) first_median = median;
      if (median < shortest_median) {
        shortest_median = median;
        fastest = candidate.choice;
      }
    }
    const bool first_runs = first_median < std::numeric_limits<float>::infinity();
    if (first_runs && shortest_median > kWorthwhile * first_median) fastest = {};
  }
  static_cast<void>(cudaGetLastError());  // what failed here is nobody else's
  return fastest;
}

}  // namespace te::gemm::cublaslt
