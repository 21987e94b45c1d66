// On GPUs the main stream is XLA's. The other streams and the events are created once and belong to one call at a time:
// another device waits for an event as it was last recorded, so it must not be recorded again
// before every host thread that waits for it has said so to its own device.

#include <cuda.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <memory>
#include <mutex>
#include <string_view>
#include <variant>

#include "collective_gemm/protocol.h"
#include "common/cuda_driver.h"
#include "common/cuda_status.h"
#include "common/vector.cuh"

namespace te::collective_gemm {
namespace {

// Reads all summands once and writes the result once.
template <typename T>
__global__ void SumParts(const Summands summands, int64_t count, int64_t columns) {
  const T* const parts = static_cast<const T*>(summands.parts);
  T* const to = static_cast<T*>(summands.to);
  constexpr int kWidth = kPer16Bytes<T>;
  const int64_t first = blockIdx.x * int64_t{blockDim.x} + threadIdx.x, stride = int64_t{gridDim.x} * blockDim.x;
  const bool vectors = count % kWidth == 0;
  for (int64_t i = first; vectors && i < count / kWidth; i += stride) {
    float sum[kWidth] = {};
    for (int part = 0; part < summands.part_count; ++part) {
      float values[kWidth];
      Unpack(LoadStreaming(reinterpret_cast<const uint4*>(parts + part * count) + i), values,
             static_cast<const T*>(nullptr));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[j] += values[j];
    }
    if (summands.own != nullptr) {
#pragma unroll
      for (int j = 0; j < kWidth; j += 4) {
        float values[4];
        Unpack(LoadStreaming(reinterpret_cast<const uint4*>(summands.own + i * kWidth + j)), values,
               static_cast<const float*>(nullptr));
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[j + k] += values[k];
      }
    }
    if (summands.bias != nullptr) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[j] += summands.bias[(i * kWidth + j) % columns];
    }
    reinterpret_cast<uint4*>(to)[i] = Pack(sum, static_cast<const T*>(nullptr));
  }
  for (int64_t i = first; !vectors && i < count; i += stride) {
    float sum = 0.0f;
    for (int part = 0; part < summands.part_count; ++part) sum += ToFloat(parts[part * count + i]);
    if (summands.own != nullptr) sum += summands.own[i];
    if (summands.bias != nullptr) sum += summands.bias[i % columns];
    to[i] = FromFloat<T>(sum);
  }
}

template <typename T>
void LaunchSum(cudaStream_t stream, const ReduceScatterProblem& p, const Summands& summands) {
  const int64_t count = p.CountOfPart();
  const unsigned blocks = static_cast<unsigned>(std::clamp<int64_t>(count / kPer16Bytes<T> / 256 + 1, 1, 132 * 8));
  SumParts<T><<<blocks, 256, 0, stream>>>(summands, count, p.products.front().n);
}

// The streams and events of one call.
struct Resources {
  cudaStream_t copy = nullptr, side = nullptr;
  std::vector<cudaEvent_t> events;
  std::atomic<int> readers{0};
  bool taken = false;
};

struct Device {
  std::mutex mutex;
  std::vector<std::unique_ptr<Resources>> resources;
  PerDevice<std::monostate> peers;  // whose memory this device may access
};

Status CurrentDevice(Device** device) {
  static PerDevice<Device> devices;
  return OfCurrentDevice(devices, [](Device&) { return Status::Ok(); }, device);
}

Status MakeEvent(Resources& resources) {
  cudaEvent_t event = nullptr;
  TE_JAX_TRY(Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate"));
  resources.events.push_back(event);
  return Status::Ok();
}

class CudaCall {
 public:
  static constexpr bool kOneByOne = true;

  explicit CudaCall(cudaStream_t main) : main_(main) {}
  CudaCall(const CudaCall&) = delete;
  CudaCall& operator=(const CudaCall&) = delete;
  ~CudaCall() {
    if (resources_ == nullptr) return;
    const std::lock_guard lock(device_->mutex);
    resources_->taken = false;
  }

  Status Begin() {
    TE_JAX_TRY(CurrentDevice(&device_));
    const std::lock_guard lock(device_->mutex);
    for (const auto& resources : device_->resources) {
      if (resources->taken || resources->readers.load() != 0) continue;
      resources_ = resources.get();
      break;
    }
    if (resources_ == nullptr) {
      auto made = std::make_unique<Resources>();
      for (cudaStream_t* const stream : {&made->copy, &made->side}) {
        TE_JAX_TRY(Check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "cudaStreamCreate"));
      }
      device_->resources.push_back(std::move(made));
      resources_ = device_->resources.back().get();
    }
    resources_->taken = true;
    return Status::Ok();
  }

  // Creates as many events as a call records, so that calls create none.
  Status Prepare(size_t events) {
    while (resources_->events.size() < events) TE_JAX_TRY(MakeEvent(*resources_));
    return Status::Ok();
  }

  Status Record(Stream stream, void*& event) {
    if (event == nullptr) {
      if (used_ == resources_->events.size()) TE_JAX_TRY(MakeEvent(*resources_));
      event = resources_->events[used_++];
    }
    return Check(cudaEventRecord(static_cast<cudaEvent_t>(event), StreamOf(stream)), "cudaEventRecord");
  }

  Status Wait(Stream stream, void* event) {
    return Check(cudaStreamWaitEvent(StreamOf(stream), static_cast<cudaEvent_t>(event), 0), "cudaStreamWaitEvent");
  }

  Status Copy(Stream stream, void* to, const void* from, int64_t bytes) {
    return Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, StreamOf(stream)), "copy between devices");
  }

  Status Multiply(Stream stream, const gemm::Problem& problem) {
    return gemm::Run(Executor{StreamOf(stream)}, problem);
  }

  Status Sum(Stream stream, const ReduceScatterProblem& p, const Summands& summands) {
    switch (p.type) {
      case gemm::Type::kFloat32:
        LaunchSum<float>(StreamOf(stream), p, summands);
        break;
      case gemm::Type::kBFloat16:
        LaunchSum<__nv_bfloat16>(StreamOf(stream), p, summands);
        break;
      default:
        LaunchSum<__half>(StreamOf(stream), p, summands);
        break;
    }
    return Check(cudaGetLastError(), "launch");
  }

  std::atomic<int>* Readers() { return &resources_->readers; }

  // Errors here have occurred before, and were reported; `Check` leaves none to the next call.
  void Synchronize() {
    static_cast<void>(Check(cudaStreamSynchronize(main_), "cudaStreamSynchronize"));
    if (resources_ == nullptr) return;
    for (const cudaStream_t stream : {resources_->copy, resources_->side}) {
      static_cast<void>(Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"));
    }
  }
  void SynchronizeEvent(void* event) {
    static_cast<void>(Check(cudaEventSynchronize(static_cast<cudaEvent_t>(event)), "cudaEventSynchronize"));
  }

 private:
  cudaStream_t StreamOf(Stream stream) const {
    return stream == Stream::kMain ? main_ : stream == Stream::kSide ? resources_->side : resources_->copy;
  }

  cudaStream_t main_;
  Device* device_ = nullptr;
  Resources* resources_ = nullptr;
  size_t used_ = 0;
};

// Asks the driver once for each peer.
Status EnablePeerAccess(const Group& group) {
  Device* device = nullptr;
  TE_JAX_TRY(CurrentDevice(&device));
  for (const int place : group.devices) {
    const int peer = OrdinalOf(place);
    if (peer < 0 || peer == group.device()) continue;  // a device of another process, whose segment is opened instead
    const auto enable = [&](std::monostate) {
      const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
      if (error == cudaSuccess) return Status::Ok();
      static_cast<void>(cudaGetLastError());
      if (error == cudaErrorPeerAccessAlreadyEnabled) return Status::Ok();
      return Status::Failed("GPU " + std::to_string(group.device()) + " cannot reach GPU " + std::to_string(peer) +
                            " directly (" + cudaGetErrorString(error) + "): use transport='ring' or 'xla'");
    };
    std::monostate* enabled = nullptr;
    TE_JAX_TRY(device->peers.Of(peer, enable, &enabled));
  }
  return Status::Ok();
}

// Prepares peer access, streams and events.
Status PrepareCall(const Group& group) {
  TE_JAX_TRY(EnablePeerAccess(group));
  CudaCall call(nullptr);
  TE_JAX_TRY(call.Begin());
  return call.Prepare(group.size() + 4);
}

template <typename T>
std::string AsHex(const T& value) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : std::bit_cast<std::array<unsigned char, sizeof(T)>>(value)) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

// Takes a value off the front of a text. False where the text does not begin with two digits for each of its bytes.
template <typename T>
bool TakeHex(std::string_view& text, T& value) {
  std::array<unsigned char, sizeof(T)> bytes{};
  if (text.size() < 2 * sizeof(T)) return false;
  for (size_t i = 0; i < sizeof(T); ++i) {
    const char* const end = text.data() + 2 * i + 2;
    const auto [last, error] = std::from_chars(end - 2, end, bytes[i], 16);
    if (error != std::errc() || last != end) return false;
  }
  value = std::bit_cast<T>(bytes);
  text.remove_prefix(2 * sizeof(T));
  return true;
}

// Memory and two events of this device, or of one that another process drives. Never freed: peers may be using them
// while this process ends.
class CudaSegment : public Segment {
 public:
  CudaSegment(void* data, cudaEvent_t first, cudaEvent_t second, std::string description)
      : data_(data), events_{first, second}, description_(std::move(description)) {}
  std::string Describe() const override { return description_; }
  void* data() const override { return data_; }
  void* event(int stage) const override { return events_[stage]; }

 private:
  void* data_;
  cudaEvent_t events_[2];
  std::string description_;
};

constexpr unsigned kBetweenProcesses = cudaEventDisableTiming | cudaEventInterprocess;

void Destroy(const cudaEvent_t (&events)[2]) {
  for (const cudaEvent_t event : events) {
    if (event != nullptr) static_cast<void>(cudaEventDestroy(event));
  }
}

// Fails where fewer bytes are mapped from there on, whatever their owner says of them. A driver that does not tell is
// no reason to refuse.
Status Measure(const void* data, int64_t bytes) {
  static const auto get_range = FindInDriver<CUresult (*)(CUdeviceptr*, size_t*, CUdeviceptr)>("cuMemGetAddressRange");
  const auto begin = reinterpret_cast<CUdeviceptr>(data);
  CUdeviceptr base = 0;
  size_t size = 0;
  if (get_range == nullptr || get_range(&base, &size, begin) != CUDA_SUCCESS) return Status::Ok();
  const auto mapped = static_cast<int64_t>(base + size - begin);
  if (mapped >= bytes) return Status::Ok();
  return Status::Failed("it has " + std::to_string(mapped) + " bytes instead of " + std::to_string(bytes));
}

}  // namespace

Status CreateSegment(int device, int64_t bytes, std::unique_ptr<Segment>& made) {
  const ScopedDevice scoped(device);
  TE_JAX_TRY(scoped.status());
  void* data = nullptr;
  cudaEvent_t events[2] = {};
  std::string description;
  const auto make = [&] {
    cudaIpcMemHandle_t memory{};
    TE_JAX_TRY(Check(cudaMalloc(&data, bytes), "cudaMalloc of memory that processes share"));
    TE_JAX_TRY(Check(cudaIpcGetMemHandle(&memory, data), "cudaIpcGetMemHandle"));
    description = AsHex(memory);
    for (cudaEvent_t& event : events) {
      cudaIpcEventHandle_t handle{};
      TE_JAX_TRY(Check(cudaEventCreateWithFlags(&event, kBetweenProcesses), "cudaEventCreate"));
      TE_JAX_TRY(Check(cudaIpcGetEventHandle(&handle, event), "cudaIpcGetEventHandle"));
      description += AsHex(handle);
    }
    return Status::Ok();
  };
  if (Status status = make(); !status.ok()) {
    Destroy(events);
    static_cast<void>(cudaFree(data));
    return status;
  }
  made = std::make_unique<CudaSegment>(data, events[0], events[1], std::move(description));
  return Status::Ok();
}

Status OpenSegment(int device, int64_t bytes, const std::string& description, std::unique_ptr<Segment>& opened) {
  const ScopedDevice scoped(device);
  TE_JAX_TRY(scoped.status());
  cudaIpcMemHandle_t memory{};
  cudaIpcEventHandle_t handles[2] = {};
  std::string_view text = description;
  if (!TakeHex(text, memory) || !TakeHex(text, handles[0]) || !TakeHex(text, handles[1]) || !text.empty()) {
    return Status::Failed("its text is malformed: run the same version of te_jax in all processes");
  }
  void* data = nullptr;
  cudaEvent_t events[2] = {};
  TE_JAX_TRY(Check(cudaIpcOpenMemHandle(&data, memory, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle"));
  const auto open = [&] {
    TE_JAX_TRY(Measure(data, bytes));
    for (int i = 0; i < 2; ++i) {
      TE_JAX_TRY(Check(cudaIpcOpenEventHandle(&events[i], handles[i]), "cudaIpcOpenEventHandle"));
    }
    return Status::Ok();
  };
  if (Status status = open(); !status.ok()) {
    Destroy(events);
    static_cast<void>(cudaIpcCloseMemHandle(data));
    return status;
  }
  opened = std::make_unique<CudaSegment>(data, events[0], events[1], description);
  return Status::Ok();
}

Status AllGather(const Executor& executor, const Group& group, const AllGatherProblem& problem) {
  CudaCall call(executor.stream);
  return RunAllGather(call, group, problem);
}

Status ReduceScatter(const Executor& executor, const Group& group, const ReduceScatterProblem& problem) {
  CudaCall call(executor.stream);
  return RunReduceScatter(call, group, problem);
}

Status PrepareAllGather(const Executor& executor, const Group& group, const AllGatherProblem& p) {
  const ScopedDevice scoped(group.device());
  TE_JAX_TRY(scoped.status());
  TE_JAX_TRY(PrepareCall(group));
  for (const Product& product : p.products) {
    for (int rank = 0; rank < group.size(); ++rank) {
      TE_JAX_TRY(gemm::Prepare(executor, ProductOfPart(group, p, product, rank, 0)));
    }
  }
  return Status::Ok();
}

Status PrepareReduceScatter(const Executor& executor, const Group& group, const ReduceScatterProblem& p) {
  const ScopedDevice scoped(group.device());
  TE_JAX_TRY(scoped.status());
  TE_JAX_TRY(PrepareCall(group));
  cudaFuncAttributes attributes;
  TE_JAX_TRY(Check(cudaFuncGetAttributes(&attributes, SumParts<float>), "cudaFuncGetAttributes"));
  TE_JAX_TRY(Check(cudaFuncGetAttributes(&attributes, SumParts<__nv_bfloat16>), "cudaFuncGetAttributes"));
  TE_JAX_TRY(Check(cudaFuncGetAttributes(&attributes, SumParts<__half>), "cudaFuncGetAttributes"));
  const int size = group.size();
  for (int step = 0; step < size; ++step) {
    const int owner = (group.rank + step + 1) % size;
    const bool own = owner == group.rank, outgoing = !own && p.outgoing != nullptr;
    const int part = outgoing ? step : PartFrom(group.rank, owner, size);
    char* const at = static_cast<char*>(outgoing ? p.outgoing : p.received) + part * p.BytesOfPart();
    void* const to = p.sums != nullptr ? p.SumsOf(step) : own && p.LastProductAdds(size) ? p.z : at;
    const void* const added = own && p.LastProductAdds(size) && size > 1 ? p.received : nullptr;
    for (size_t i = 0; i < p.products.size(); ++i) {
      TE_JAX_TRY(gemm::Prepare(executor, ProductOfRows(group, p, i, owner, to, added)));
    }
  }
  return Status::Ok();
}

}  // namespace te::collective_gemm
