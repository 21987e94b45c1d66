// On CPUs the calling thread does all work at once: streams have no order to keep, and events are not needed.

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "collective_gemm/protocol.h"
#include "common/cpu_float.h"

namespace te::collective_gemm {
namespace {

template <typename T>
void SumParts(const Executor& executor, const ReduceScatterProblem& p, const Summands& s) {
  constexpr int64_t kGrain = 1 << 14;
  const int64_t columns = p.products.front().n, count = p.CountOfPart();
  executor.ParallelFor(count, kGrain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float sum = 0.0f;
      for (int part = 0; part < s.part_count; ++part) sum += ToFloat(static_cast<const T*>(s.parts)[part * count + i]);
      if (s.own != nullptr) sum += s.own[i];
      if (s.bias != nullptr) sum += s.bias[i % columns];
      FromFloat(sum, static_cast<T*>(s.to) + i);
    }
  });
}

class CpuCall {
 public:
  static constexpr bool kOneByOne = false;  // XLA's threads may make calls that do not need each other at once

  explicit CpuCall(const Executor& executor) : executor_(executor) {}

  Status Begin() { return Status::Ok(); }
  Status Record(Stream, void*&) { return Status::Ok(); }
  Status Wait(Stream, void*) { return Status::Ok(); }
  Status Copy(Stream, void* to, const void* from, int64_t bytes) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return Status::Ok();
  }
  Status Multiply(Stream, const gemm::Problem& problem) { return gemm::Run(executor_, problem); }
  Status Sum(Stream, const ReduceScatterProblem& p, const Summands& summands) {
    switch (p.type) {
      case gemm::Type::kFloat32:
        SumParts<float>(executor_, p, summands);
        break;
      case gemm::Type::kBFloat16:
        SumParts<BFloat16>(executor_, p, summands);
        break;
      default:
        SumParts<Float16>(executor_, p, summands);
        break;
    }
    return Status::Ok();
  }
  std::atomic<int>* Readers() { return nullptr; }
  void Synchronize() {}
  void SynchronizeEvent(void*) {}

 private:
  const Executor& executor_;
};

}  // namespace

// Memory of this process that its peers map.
class CpuSegment : public Segment {
 public:
  explicit CpuSegment(std::unique_ptr<SharedMemory> memory) : memory_(std::move(memory)) {}
  std::string Describe() const override { return memory_->name(); }
  void* data() const override { return memory_->data(); }
  void* event(int) const override { return nullptr; }
  void AllOpened() override { memory_->Release(); }

 private:
  std::unique_ptr<SharedMemory> memory_;
};

Status CreateSegment(int, int64_t bytes, std::unique_ptr<Segment>& made) {
  std::unique_ptr<SharedMemory> memory;
  TE_JAX_TRY(SharedMemory::Create(bytes, memory));
  made = std::make_unique<CpuSegment>(std::move(memory));
  return Status::Ok();
}

Status OpenSegment(int, int64_t bytes, const std::string& description, std::unique_ptr<Segment>& opened) {
  std::unique_ptr<SharedMemory> memory;
  TE_JAX_TRY(SharedMemory::Open(description, bytes, memory));
  memory->Release();
  opened = std::make_unique<CpuSegment>(std::move(memory));
  return Status::Ok();
}

Status AllGather(const Executor& executor, const Group& group, const AllGatherProblem& problem) {
  CpuCall call(executor);
  return RunAllGather(call, group, problem);
}

Status ReduceScatter(const Executor& executor, const Group& group, const ReduceScatterProblem& problem) {
  CpuCall call(executor);
  return RunReduceScatter(call, group, problem);
}

}  // namespace te::collective_gemm
