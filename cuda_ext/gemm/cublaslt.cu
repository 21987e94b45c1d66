#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/cuda_status.h"
#include "common/lru_cache.h"
#include "common/vector.cuh"
#include "gemm/cublaslt.h"
#include "gemm/cublaslt_plan.h"
#include "gemm/cublaslt_tuning.h"

namespace te::gemm::cublaslt {
namespace {

constexpr size_t kPlansPerDevice = 1024;
constexpr int64_t kAlignment = 256;

// ------------------------------------------------------------------------------------------------------- workspace

// The workspace begins with scalars, each on 16 bytes of its own; the rest, aligned, is cuBLASLt's.
struct Workspace {
  struct alignas(16) Scalar {
    float value;
  };
  struct Scalars {
    Scalar a_scale_inv, b_scale_inv;
  };
  Scalars* scalars;
  void* rest;
  int64_t rest_bytes;
};

Status Divide(const Problem& problem, Workspace& workspace) {
  constexpr int64_t kReserved = 2 * kAlignment;  // for the scalars, and for what alignment costs
  if (problem.workspace_bytes < kReserved) {
    return Status::Failed("the workspace is smaller than 512 bytes: export the program where JAX sees a GPU");
  }
  const auto begin = (reinterpret_cast<uintptr_t>(problem.workspace) + kAlignment - 1) / kAlignment * kAlignment;
  workspace = {reinterpret_cast<Workspace::Scalars*>(begin), reinterpret_cast<void*>(begin + kAlignment),
               problem.workspace_bytes - kReserved};
  return Status::Ok();
}

__global__ void Copy(const float* from, float* to) { *to = *from; }

Arrays ArraysOf(const Problem& p, const Workspace& workspace) {
  Workspace::Scalars& scalars = *workspace.scalars;
  return {p.a.data,
          p.b.data,
          p.accumulator,
          p.bias,
          p.preactivation,
          p.d,
          OnSixteenBytes(p.a.scales) ? p.a.scales : &scalars.a_scale_inv.value,
          OnSixteenBytes(p.b.scales) ? p.b.scales : &scalars.b_scale_inv.value,
          workspace.rest};
}

// ----------------------------------------------------------------------------------------------------------- plans

struct Device {
  cublasLtHandle_t handle = nullptr;
  std::string kind;  // GPUs of one kind get the same suggestions in the same order
  LruCache<Key, Plan, HashOfKey> plans{kPlansPerDevice};

  ~Device() {
    if (handle != nullptr) cublasLtDestroy(handle);
  }
};

Status CurrentDevice(Device** device) {
  static PerDevice<Device> devices;
  const auto make = [](Device& made) {
    int ordinal = 0;
    cudaDeviceProp properties{};
    TE_JAX_TRY(Check(cudaGetDevice(&ordinal), "cudaGetDevice"));
    TE_JAX_TRY(Check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties"));
    made.kind = std::string(properties.name) + ", " + std::to_string(properties.multiProcessorCount);
    return Check(cublasLtCreate(&made.handle), "cublasLtCreate");
  };
  return OfCurrentDevice(devices, make, device);
}

// The fastest algorithms, for all GPUs of one kind: on the same values they must compute the same bits, or replicas
// would drift apart.
struct Choices {
  using KindAndKey = std::pair<std::string, Key>;
  struct Hash {
    size_t operator()(const KindAndKey& key) const {
      return HashOfKey()(key.second) ^ std::hash<std::string>()(key.first);
    }
  };
  LruCache<KindAndKey, Choice, Hash> algorithms{kPlansPerDevice};
  std::mutex searching;  // one search at a time: the second thread finds what the first one found
};

Choices& TheChoices() {
  static auto* choices = new Choices;
  return *choices;
}

// Keeps the fastest plan: the given one or, where the product has them, that of the package's kernel or that which
// spreads scales.
void ChooseAlgorithm(Device& device, const Arrays& arrays, std::unique_ptr<Plan>& plan) {
  const Choices::KindAndKey key{device.kind, plan->key()};
  std::vector<std::unique_ptr<Plan>> plans;
  plans.push_back(std::move(plan));
  for (const std::optional<Key>& other : {TeJaxKeyOf(key.second), SpreadKeyOf(key.second)}) {
    std::unique_ptr<Plan> made;
    // Products can do without.
    if (other && Plan::Make(device.handle, *other, arrays, made).ok() && made->refusal().ok()) {
      plans.push_back(std::move(made));
    }
  }
  std::shared_ptr<Choice> known = TheChoices().algorithms.Find(key);
  if (known == nullptr) {
    known = std::make_shared<Choice>(FastestAlgorithm(device.handle, plans));
    TheChoices().algorithms.Insert(key, known);
  }
  // Another GPU of the kind may have had further suggestions.
  const bool found = known->plan < plans.size() && known->algorithm < plans[known->plan]->algorithms();
  plan = std::move(plans[found ? known->plan : 0]);
  if (found) plan->Choose(known->algorithm);
}

// The plan for a key, perhaps one without algorithms. Where it has to be searched for, candidates are timed only if
// `tune`; where that was put off before, it is made up for.
Status FindPlan(Device& device, const Key& key, const Arrays& arrays, bool tune, std::shared_ptr<Plan>& plan) {
  auto suffices = [&] { return plan != nullptr && (plan->settled || !tune); };
  plan = device.plans.Find(key);
  if (suffices()) return Status::Ok();
  const std::lock_guard lock(TheChoices().searching);
  plan = device.plans.Find(key);
  if (suffices()) return Status::Ok();
  std::unique_ptr<Plan> made;
  if (Status status = Plan::Make(device.handle, key, arrays, made); !status.ok()) return status;
  const bool refused = !made->refusal().ok();
  if (tune && !refused) ChooseAlgorithm(device, arrays, made);
  made->settled = tune || refused || key.algorithm != Algorithm::kAuto;
  plan = std::move(made);
  device.plans.Insert(key, plan);
  return Status::Ok();
}

// Fails for a plan without algorithms, unless the caller wants to know.
Status Answer(const Plan& plan, bool* has_algorithm) {
  if (has_algorithm == nullptr) return plan.refusal();
  *has_algorithm = plan.refusal().ok();
  return Status::Ok();
}

}  // namespace

Status Run(cudaStream_t stream, const Problem& p, bool* has_algorithm) {
  Workspace workspace{};
  TE_JAX_TRY(Divide(p, workspace));
  Device* device = nullptr;
  TE_JAX_TRY(CurrentDevice(&device));
  const Arrays arrays = ArraysOf(p, workspace);
  std::shared_ptr<Plan> plan;
  TE_JAX_TRY(FindPlan(*device, KeyOf(p, arrays, workspace.rest_bytes), arrays, /*tune=*/false, plan));
  TE_JAX_TRY(Answer(*plan, has_algorithm));
  if (!plan->refusal().ok()) return Status::Ok();

  // Scalars of a batch are not aligned.
  if (arrays.a_scale_inv != p.a.scales) Copy<<<1, 1, 0, stream>>>(p.a.scales, &workspace.scalars->a_scale_inv.value);
  if (arrays.b_scale_inv != p.b.scales) Copy<<<1, 1, 0, stream>>>(p.b.scales, &workspace.scalars->b_scale_inv.value);
  if (Status status = Check(cudaGetLastError(), "kernel launch"); !status.ok()) return status;
  return plan->Launch(device->handle, arrays, stream);
}

Status Prepare(cudaStream_t stream, const Problem& p, bool* has_algorithm) {
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  TE_JAX_TRY(Check(cudaStreamIsCapturing(stream, &capturing), "cudaStreamIsCapturing"));
  if (capturing != cudaStreamCaptureStatusNone) return Status::Ok();
  Workspace workspace{};
  TE_JAX_TRY(Divide(p, workspace));
  int ordinal = -1;
  TE_JAX_TRY(Check(cudaStreamGetDevice(stream, &ordinal), "cudaStreamGetDevice"));
  const ScopedDevice scoped(ordinal);
  TE_JAX_TRY(scoped.status());
  Device* device = nullptr;
  TE_JAX_TRY(CurrentDevice(&device));
  const Arrays arrays = ArraysOf(p, workspace);
  std::shared_ptr<Plan> plan;
  const bool tune = p.algorithm == Algorithm::kAuto;
  TE_JAX_TRY(FindPlan(*device, KeyOf(p, arrays, workspace.rest_bytes), arrays, tune, plan));
  return Answer(*plan, has_algorithm);
}

}  // namespace te::gemm::cublaslt
