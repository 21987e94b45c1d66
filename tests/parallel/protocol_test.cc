// The protocol of collective products on simulated devices whose streams are threads.
//
// Copies and products take random times, and nothing but events orders them: ThreadSanitizer reports every read and
// write that the protocol leaves unordered, and results are compared besides. Between calls each device writes over
// what its peers have read, and poisons what they have written. Some steps fail: then no stream may touch an array any
// more once its call has returned. To some calls one device brings another number of pieces, or it makes another call:
// then all refuse. Some hosts take longer than the timeout after the first rendezvous: then none gives up. Exits with 0
// if all went well.

#include "collective_gemm/protocol.h"

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <thread>

namespace te::collective_gemm {

// Nothing is shared between processes here.
Status CreateSegment(int, int64_t, std::unique_ptr<Segment>&) { return Status::Failed("not simulated"); }
Status OpenSegment(int, int64_t, const std::string&, std::unique_ptr<Segment>&) {
  return Status::Failed("not simulated");
}

namespace {

using gemm::Type;

// Has a point in a stream been passed?
class Point {
 public:
  void Pass() {
    const std::lock_guard lock(mutex_);
    passed_ = true;
    changed_.notify_all();
  }
  void Await() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return passed_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
};

// As in CUDA, a stream that waits for an event waits for the point at which it was last recorded by then.
class Event {
 public:
  std::shared_ptr<Point> Record() {
    const std::lock_guard lock(mutex_);
    return last_ = std::make_shared<Point>();
  }
  std::shared_ptr<Point> Last() {
    const std::lock_guard lock(mutex_);
    return last_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Point> last_ = std::make_shared<Point>();
};

constexpr std::chrono::milliseconds kTimeoutOfSlow{400};

// Work that is done in order, some time.
class SimulatedStream {
 public:
  SimulatedStream() : thread_([this] { Run(); }) {}
  ~SimulatedStream() {
    Do(nullptr);
    thread_.join();
  }
  void Do(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_one();
  }
  void Drain() {
    const auto point = std::make_shared<Point>();
    Do([point] { point->Pass(); });
    point->Await();
  }

 private:
  void Run() {
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !work_.empty(); });
      const std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      if (!work) return;
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  std::thread thread_;
};

// As the CUDA calls keep them: of one call at a time, and not of another before all peers have said what they wait for.
struct Resources {
  SimulatedStream copy, side;
  std::deque<Event> events;
  std::atomic<int> readers{0};
};

struct Device {
  SimulatedStream main;
  std::vector<std::unique_ptr<Resources>> free;
  std::mt19937 random;
};

class SimulatedCall {
 public:
  static constexpr bool kOneByOne = true;

  SimulatedCall(Device& device, int failing_step, int slow_step)
      : device_(device), steps_left_(failing_step), steps_to_slow_(slow_step) {}
  ~SimulatedCall() {
    if (resources_ != nullptr) device_.free.push_back(std::move(resources_));
  }

  Status Begin() {
    if (Fails()) return Status::Failed("simulated");
    const auto found =
        std::ranges::find_if(device_.free, [](const auto& resources) { return resources->readers.load() == 0; });
    if (found == device_.free.end()) {
      resources_ = std::make_unique<Resources>();
    } else {
      resources_ = std::move(*found);
      device_.free.erase(found);
    }
    return Status::Ok();
  }

  Status Record(Stream stream, void*& event) {
    if (Fails()) return Status::Failed("simulated");
    if (used_ == resources_->events.size()) resources_->events.emplace_back();
    Event& next = resources_->events[used_++];
    StreamOf(stream).Do([point = next.Record()] { point->Pass(); });
    event = &next;
    return Status::Ok();
  }
  Status Wait(Stream stream, void* event) {
    if (event == nullptr) std::abort();
    StreamOf(stream).Do([point = static_cast<Event*>(event)->Last()] { point->Await(); });
    return Status::Ok();
  }
  Status Copy(Stream stream, void* to, const void* from, int64_t bytes) {
    if (Fails()) return Status::Failed("simulated");
    StreamOf(stream).Do([=, this, pause = Pause()] {
      std::this_thread::sleep_for(pause);
      std::memcpy(to, from, bytes);
    });
    return Status::Ok();
  }
  Status Multiply(Stream stream, const gemm::Problem& problem) {
    if (Fails()) return Status::Failed("simulated");
    StreamOf(stream).Do([=, pause = Pause()] {
      std::this_thread::sleep_for(pause);
      for (int64_t i = 0; i < problem.batch.count; ++i) MultiplyOnce(gemm::MemberOf(problem, i));
    });
    return Status::Ok();
  }
  static void MultiplyOnce(const gemm::Problem& p) {
    const auto *a = static_cast<const float*>(p.a.data), *b = static_cast<const float*>(p.b.data);
    auto* d = static_cast<float*>(p.d);
    for (int64_t i = 0; i < p.m; ++i) {
      for (int64_t j = 0; j < p.n; ++j) {
        float sum = p.accumulator == nullptr ? 0.0f : static_cast<const float*>(p.accumulator)[i * p.n + j];
        for (int64_t k = 0; k < p.k; ++k) sum += a[i * p.k + k] * b[j * p.k + k];
        d[i * p.n + j] = sum;
      }
    }
  }
  Status Sum(Stream stream, const ReduceScatterProblem& p, const Summands& s) {
    if (Fails()) return Status::Failed("simulated");
    StreamOf(stream).Do([=, count = p.CountOfPart(), pause = Pause()] {
      std::this_thread::sleep_for(pause);
      for (int64_t i = 0; i < count; ++i) {
        float sum = s.own == nullptr ? 0.0f : s.own[i];
        for (int part = 0; part < s.part_count; ++part) sum += static_cast<const float*>(s.parts)[part * count + i];
        static_cast<float*>(s.to)[i] = sum;
      }
    });
    return Status::Ok();
  }
  std::atomic<int>* Readers() { return &resources_->readers; }
  void Synchronize() {
    device_.main.Drain();
    if (resources_ == nullptr) return;
    for (SimulatedStream* const stream : {&resources_->copy, &resources_->side}) stream->Drain();
  }
  void SynchronizeEvent(void* event) { static_cast<Event*>(event)->Last()->Await(); }

 private:
  SimulatedStream& StreamOf(Stream stream) {
    return stream == Stream::kMain ? device_.main : stream == Stream::kSide ? resources_->side : resources_->copy;
  }
  bool Fails() {
    if (steps_to_slow_ >= 0 && steps_to_slow_-- == 0) std::this_thread::sleep_for(2 * kTimeoutOfSlow);
    return steps_left_ >= 0 && steps_left_-- == 0;
  }
  std::chrono::microseconds Pause() { return std::chrono::microseconds(device_.random() % 4 == 0 ? 300 : 0); }

  Device& device_;
  std::unique_ptr<Resources> resources_;
  size_t used_ = 0;
  int steps_left_, steps_to_slow_;
};

constexpr int64_t kRows = 3, kSummed = 4, kColumns = 5;

// What all devices of a group do in one call, known to all of them.
struct Plan {
  int size;
  bool gathers;
  bool direct;  // gathers put, and products of scatters write to their peers
  int weights;  // of a scatter
  int64_t pieces;
  int failing_rank, failing_step;  // or -1
  bool one_stays_away;
  bool biased;    // by nothing: of two devices the last product then leaves the sum to another step
  int slow_rank;  // whose host takes longer than the timeout between the two rendezvous, or -1
  bool one_differs = false;
  bool one_makes_another_call = false;

  bool AddsUp() const { return weights > 1; }
  bool SendsCopies() const { return !direct || AddsUp(); }

  // What can fail on one device: to begin, events, copies, products and sums.
  int Steps() const { return StepsInCommon() + StepsAlone(); }
  // Before the second rendezvous: where one fails, all do.
  int StepsInCommon() const {
    const int peers = size - 1;
    if (!gathers) {
      const int rounded = !AddsUp() ? 0 : peers + std::max(size - 2, 0);
      return 2 + peers * (weights + (SendsCopies() ? 3 : 1)) + rounded;
    }
    const int of_each = static_cast<int>(pieces), copies = peers * (of_each + 2) + 3 + (pieces == 2 ? of_each + 1 : 0);
    return 3 + copies + (direct ? 0 : peers);
  }
  int StepsAlone() const {
    if (gathers) return 1 + (direct ? size - 1 : 0);
    return weights + (AddsUp() || biased || size > 2 ? 1 : 0);
  }
  bool Fails(int rank) const {
    return one_stays_away || one_differs || one_makes_another_call ||
           (failing_rank >= 0 && (failing_step < StepsInCommon() || rank == failing_rank));
  }
};

// Whole numbers, so that sums are exact: of x and of w, by the owner and the call.
float Value(int rank, int call, int64_t i) { return static_cast<float>((rank * 7 + call * 3 + i) % 11 - 5); }

class Member {
 public:
  Member(int rank, int size, unsigned seed) : rank_(rank) {
    device_.random.seed(seed);
    const int64_t most = 2 * size * std::max({kRows * kSummed, kRows * kColumns, kColumns * kSummed});
    for (auto* array : {&x_, &w_, &all_, &others_, &all_others_, &y_, &received_, &outgoing_, &sums_}) {
      array->assign(size * most, 0);
    }
  }

  // Empty, or what went wrong.
  std::string Run(Plan plan, int number) {
    Fill(plan, number);
    if (plan.one_differs && rank_ == 0) plan.pieces = 3 - plan.pieces;
    const bool fails = plan.Fails(rank_);
    if (plan.one_stays_away && rank_ == 0) {
      device_.main.Drain();
      return "";
    }
    std::vector<int> devices;
    for (int rank = 0; rank < plan.size; ++rank) devices.push_back(rank);
    const auto timeout =
        plan.slow_rank >= 0 ? kTimeoutOfSlow : std::chrono::milliseconds(plan.one_stays_away ? 200 : 60'000);
    const int call = plan.one_makes_another_call && rank_ == 0 ? 2 : 1;
    const int64_t run = plan.size * int64_t{1'000'000} + number;
    const Group group{"simulated", run, call, rank_, devices, timeout, nullptr};
    Status status = Status::Ok();
    {
      SimulatedCall call(device_, rank_ == plan.failing_rank ? plan.failing_step : -1,
                         rank_ == plan.slow_rank ? plan.StepsInCommon() - 1 : -1);
      status = plan.gathers ? RunAllGather(call, group, AllGather(plan)) : RunReduceScatter(call, group, Scatter(plan));
    }
    if (fails && status.ok()) return "no error";
    if (plan.one_makes_another_call && status.reason().find("makes call 2") == std::string::npos) {
      return status.reason();
    }
    if (!fails && !status.ok()) return status.reason();
    if (fails) {  // once its own stream is done, XLA may use the arrays for something else
      device_.main.Drain();
      Poison();
      return "";
    }
    device_.main.Do([=, this] {
      if (problem_.empty()) problem_ = plan.gathers ? CheckGathered(plan, number) : CheckScattered(plan, number);
      Poison();
    });
    if (number % 5 != 0) return "";  // the host runs ahead of the stream
    device_.main.Drain();
    return problem_;
  }

  std::string ProblemAtTheEnd() {
    device_.main.Drain();
    for (const auto& resources : device_.free) {
      if (resources->readers.load() != 0) return "events are kept for readers that have left";
    }
    return problem_;
  }

 private:
  void Fill(const Plan& plan, int number) {
    device_.main.Do([=, this] {
      Poison();
      const int64_t parts = plan.gathers ? 1 : plan.size;
      for (int64_t i = 0; i < plan.pieces * parts * kRows * kSummed; ++i) x_[i] = Value(rank_, number, i);
      for (int64_t i = 0; i < kColumns * kSummed; ++i) w_[i] = Value(rank_, number + 1, i);
      for (int64_t i = 0; i < kRows; ++i) others_[i] = Value(rank_, number + 2, i);
    });
  }

  void Poison() {
    for (auto* array : {&x_, &all_, &others_, &all_others_, &y_, &received_, &outgoing_, &sums_}) {
      for (float& value : *array) value = 1e30f;
    }
  }

  gemm::Problem Product() const {
    gemm::Problem problem{};
    problem.m = kRows, problem.n = kColumns, problem.k = kSummed;
    problem.a = {x_.data(), nullptr, Type::kFloat32, false};
    problem.b = {w_.data(), nullptr, Type::kFloat32, false};
    problem.d_type = Type::kFloat32;
    return problem;
  }

  AllGatherProblem AllGather(const Plan& plan) {
    AllGatherProblem problem{};
    problem.x = {x_.data(), all_.data(), plan.pieces, kRows * kSummed * 4, plan.pieces == 2};
    problem.others = {{others_.data(), all_others_.data(), 1, kRows * 4, true}};
    problem.products = {{Product(), y_.data()}};
    problem.put = plan.direct;
    return problem;
  }

  ReduceScatterProblem Scatter(const Plan& plan) {
    ReduceScatterProblem problem{};
    problem.type = Type::kFloat32;
    problem.products.assign(plan.weights, Product());
    problem.scales_of_piece.assign(plan.weights, 0);
    problem.pieces = plan.pieces;
    problem.received = received_.data();
    problem.outgoing = plan.SendsCopies() ? outgoing_.data() : nullptr;
    problem.sums = plan.AddsUp() ? sums_.data() : nullptr;
    problem.bias = plan.biased ? nothing_.data() : nullptr;
    problem.z = y_.data();
    return problem;
  }

  static float Dot(int rank, int number, int64_t row, int of_w, int64_t column) {
    float sum = 0;
    for (int64_t k = 0; k < kSummed; ++k) {
      sum += Value(rank, number, row * kSummed + k) * Value(of_w, number + 1, column * kSummed + k);
    }
    return sum;
  }

  std::string CheckGathered(const Plan& plan, int number) const {
    for (int64_t piece = 0; piece < plan.pieces; ++piece) {
      for (int rank = 0; rank < plan.size; ++rank) {
        for (int64_t i = 0; i < kRows * kColumns; ++i) {
          const float found = y_[(piece * plan.size + rank) * kRows * kColumns + i];
          if (found != Dot(rank, number, piece * kRows + i / kColumns, rank_, i % kColumns)) return "a wrong product";
        }
      }
    }
    for (int i = 0; i < plan.size * kRows; ++i) {
      if (all_others_[i] != Value(i / kRows, number + 2, i % kRows)) return "a wrong value gathered";
    }
    return "";
  }

  std::string CheckScattered(const Plan& plan, int number) const {
    for (int64_t piece = 0; piece < plan.pieces; ++piece) {
      for (int64_t i = 0; i < kRows * kColumns; ++i) {
        float expected = 0;
        for (int rank = 0; rank < plan.size; ++rank) {
          const int64_t row = (piece * plan.size + rank_) * kRows + i / kColumns;
          expected += plan.weights * Dot(rank, number, row, rank, i % kColumns);
        }
        if (y_[piece * kRows * kColumns + i] != expected) return "a wrong sum";
      }
    }
    return "";
  }

  const int rank_;
  std::vector<float> x_, w_, all_, others_, all_others_, y_, received_, outgoing_, sums_;
  const std::vector<float> nothing_ = std::vector<float>(kColumns);
  std::string problem_;  // the first one
  Device device_;        // its threads end before the arrays
};

int Main(int calls, unsigned seed) {
  std::mt19937 random(seed);
  for (int size = 2; size <= 4; ++size) {
    std::vector<Plan> plans;
    for (int i = 0; i < calls; ++i) {
      Plan plan{size,
                random() % 2 == 0,
                random() % 2 == 0,
                1 + static_cast<int>(random() % 2),
                1 + static_cast<int64_t>(random() % 2),
                -1,
                -1,
                false,
                random() % 2 == 0,
                -1};
      if (random() % 6 == 0) {
        plan.failing_rank = static_cast<int>(random() % size);
        plan.failing_step = static_cast<int>(random() % plan.Steps());
      } else if (random() % 40 == 0) {
        plan.one_stays_away = true;
      } else if (random() % 40 == 0) {
        plan.slow_rank = static_cast<int>(random() % size);
      } else if (random() % 20 == 0) {
        plan.one_differs = true;
      } else if (random() % 20 == 0) {
        plan.one_makes_another_call = true;
      }
      plans.push_back(plan);
    }
    std::vector<std::unique_ptr<Member>> members;
    for (int rank = 0; rank < size; ++rank) members.push_back(std::make_unique<Member>(rank, size, random()));
    std::vector<std::string> problems(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        std::mt19937 skew(seed + rank);
        for (int i = 0; i < calls && problems[rank].empty(); ++i) {
          if (skew() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(500));
          problems[rank] = members[rank]->Run(plans[i], i);
          if (!problems[rank].empty()) problems[rank] += ", until call " + std::to_string(i);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (int rank = 0; rank < size; ++rank) {
      if (problems[rank].empty()) problems[rank] = members[rank]->ProblemAtTheEnd();
      if (problems[rank].empty()) continue;
      std::fprintf(stderr, "device %d of %d, seed %u: %s\n", rank, size, seed, problems[rank].c_str());
      return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace te::collective_gemm

int main(int count, char** arguments) {
  return count == 3 ? te::collective_gemm::Main(std::atoi(arguments[1]), std::strtoul(arguments[2], nullptr, 10)) : 2;
}
