#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "common/cuda_status.h"
#include "offload/offload.h"

namespace te::offload {
namespace {

std::atomic<int64_t> disturbance{0};

// Streams of a device that wait for no other.
struct Lanes {
  cudaStream_t streams[2] = {};

  ~Lanes() {
    for (const cudaStream_t stream : streams) {
      if (stream != nullptr) cudaStreamDestroy(stream);
    }
  }
};

PerDevice<Lanes> lanes_of_devices;

Status StreamOf(Lane lane, cudaStream_t& stream) {
  Lanes* lanes = nullptr;
  const auto make = [](Lanes& made) {
    for (cudaStream_t& one : made.streams) {
      TE_JAX_TRY(Check(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking), "cudaStreamCreate"));
    }
    return Status::Ok();
  };
  TE_JAX_TRY(OfCurrentDevice(lanes_of_devices, make, &lanes));
  stream = lanes->streams[static_cast<int>(lane)];
  return Status::Ok();
}

Status Ensure(cudaEvent_t& event) {
  if (event != nullptr) return Status::Ok();
  return Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
}

void CUDART_CB Sleep(void*) {
  thread_local std::minstd_rand random{std::random_device{}()};
  const int64_t most = disturbance.load(std::memory_order_relaxed);
  if (most > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
}

}  // namespace

struct Copied::State {
  cudaEvent_t may_begin = nullptr;
  cudaEvent_t done = nullptr;

  ~State() {
    if (may_begin != nullptr) cudaEventDestroy(may_begin);
    if (done != nullptr) cudaEventDestroy(done);
  }
};

Copied::Copied() : state_(std::make_unique<State>()) {}
Copied::~Copied() = default;
Copied::Copied(Copied&&) noexcept = default;

Status CopyBeside(const Executor& executor, Lane lane, void* to, const void* from, int64_t bytes, Copied& copied) {
  Copied::State& state = *copied.state_;
  TE_JAX_TRY(Ensure(state.may_begin));
  TE_JAX_TRY(Ensure(state.done));
  cudaStream_t stream = nullptr;
  TE_JAX_TRY(StreamOf(lane, stream));
  TE_JAX_TRY(Check(cudaEventRecord(state.may_begin, executor.stream), "cudaEventRecord"));
  TE_JAX_TRY(Check(cudaStreamWaitEvent(stream, state.may_begin, 0), "cudaStreamWaitEvent"));
  if (disturbance.load(std::memory_order_relaxed) > 0) {
    TE_JAX_TRY(Check(cudaLaunchHostFunc(stream, Sleep, nullptr), "cudaLaunchHostFunc"));
  }
  const cudaMemcpyKind kind = lane == Lane::kToHost ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
  TE_JAX_TRY(Check(cudaMemcpyAsync(to, from, bytes, kind, stream), "cudaMemcpyAsync"));
  return Check(cudaEventRecord(state.done, stream), "cudaEventRecord");
}

Status WaitFor(const Executor& executor, Copied& copied) {
  const cudaEvent_t done = copied.state_->done;
  return done == nullptr ? Status::Ok() : Check(cudaStreamWaitEvent(executor.stream, done, 0), "cudaStreamWaitEvent");
}

Status CopyInOrder(const Executor& executor, void* to, const void* from, int64_t bytes) {
  return Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, executor.stream), "cudaMemcpyAsync");
}

// A failure here is not of this call, and was reported or will be. The call may have failed while XLA recorded a graph:
// a lane that is recorded has begun nothing, and an error must not be left, which XLA would find before its next call.
void Settle() {
  int device = 0;
  if (!Check(cudaGetDevice(&device), "cudaGetDevice").ok()) return;
  const Lanes* const lanes = lanes_of_devices.Find(device);
  if (lanes == nullptr) return;
  const RelaxedCapture relaxed;
  for (const cudaStream_t stream : lanes->streams) {
    cudaStreamCaptureStatus recorded = cudaStreamCaptureStatusNone;
    if (!Check(cudaStreamIsCapturing(stream, &recorded), "cudaStreamIsCapturing").ok()) continue;
    if (recorded != cudaStreamCaptureStatusNone) continue;
    static_cast<void>(Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"));
  }
}

void Disturb(int64_t microseconds) { disturbance = microseconds; }
int64_t Disturbance() { return disturbance; }

Status Poison(const Executor& executor, void* to, int64_t bytes) {
  return Check(cudaMemsetAsync(to, 0xff, bytes, executor.stream), "cudaMemsetAsync");
}

}  // namespace te::offload
