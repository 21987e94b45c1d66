// What threads of the extensions share. Several threads ask for values of `PerDevice` at a time. Bodies of
// `ParallelFor` throw in some ranges: no thread may be inside the body, or use what the caller has, once it has
// returned, and the caller gets one of the exceptions. Exits with 0 if all went well.

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/executor.h"
#include "common/per_device.h"

namespace te {
namespace {

void Must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(1);
}

// Threads that run tasks in any order, and take no more than so many of each call.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
  }
  ~Pool() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    arrived_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Executor Taking(int tasks) {
    return Executor(static_cast<int64_t>(threads_.size()), [this, tasks](std::function<void()> task) mutable {
      if (--tasks < 0) throw std::bad_alloc();
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
      arrived_.notify_one();
    });
  }

 private:
  void Work() {
    for (std::unique_lock lock(mutex_);;) {
      arrived_.wait(lock, [this] { return ended_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::function<void()>> tasks_;
  bool ended_ = false;
  std::vector<std::thread> threads_;
};

void ThrowInSomeRanges(Pool& pool, std::mt19937& random) {
  const auto draw = [&](int64_t most) { return static_cast<int64_t>(random() % (most + 1)); };
  const int64_t count = draw(200), grain = 1 + draw(7), ranges = (count + grain - 1) / grain;
  std::vector<char> throws(ranges + 1);
  const int64_t failures = draw(2) == 0 ? draw(ranges) : draw(1);
  for (int64_t i = 0; i < failures; ++i) throws[draw(ranges)] = 1;
  throws[ranges] = 0;
  const bool fails = std::ranges::count(throws, 1) > 0;
  const Executor executor = pool.Taking(draw(3) == 0 ? static_cast<int>(draw(2)) : 1000);
  std::vector<int> visits(count);  // freed when the caller has left
  bool failed = false;
  try {
    executor.ParallelFor(count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i % 16 == 0) std::this_thread::yield();
        if (throws[i / grain] != 0) throw std::runtime_error("range " + std::to_string(i / grain));
        ++visits[i];
      }
    });
  } catch (const std::runtime_error& error) {
    failed = true;
    const std::string what = error.what();
    Must(what.starts_with("range ") && throws[std::stoi(what.substr(6))] != 0, "another error than a range threw");
  }
  Must(failed == fails, "the caller does not throw where a range does, or only there");
  for (int64_t i = 0; i < count; ++i) {
    Must(visits[i] == 1 || (fails && visits[i] == 0), "an item is visited twice, or left out where nothing failed");
  }
}

void AskForValuesOfDevices(unsigned seed) {
  constexpr int kThreads = 4, kDevices = 100;
  PerDevice<std::vector<int>> values;
  std::atomic<int> made[kDevices] = {};
  std::vector<int>* first[kThreads][kDevices] = {};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 random(seed + thread);
      for (int i = 0; i < 4 * kDevices; ++i) {
        const int device = i < kDevices ? i : static_cast<int>(random() % kDevices);
        const bool fails = random() % 4 == 0;
        std::vector<int>* value = nullptr;
        const Status status = values.Of(
            device,
            [&](std::vector<int>& filled) {
              if (fails) return Status::Failed("no memory");
              std::this_thread::sleep_for(std::chrono::microseconds(20));  // so that others make one too
              filled.assign(3, device);
              ++made[device];
              return Status::Ok();
            },
            &value);
        Must(status.ok() == (value != nullptr), "a value that was not made, or one that was and is not given");
        if (value == nullptr) continue;
        Must(*value == std::vector<int>(3, device) && values.Find(device) == value, "the value of another device");
        std::vector<int>*& before = first[thread][device];
        Must(before == nullptr || before == value, "a device has a second value");
        before = value;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int device = 0; device < kDevices; ++device) {
    Must((values.Find(device) != nullptr) == (made[device] > 0), "a value that was made is not kept");
    for (int thread = 0; thread < kThreads; ++thread) {
      Must(first[thread][device] == nullptr || first[thread][device] == values.Find(device), "threads disagree");
    }
  }
  Must(values.Find(kDevices) == nullptr, "a device that was not asked for has a value");
}

}  // namespace
}  // namespace te

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  const unsigned seed = argc > 2 ? std::atoi(argv[2]) : 0;
  std::mt19937 random(seed);
  te::Pool pool(4);
  for (int round = 0; round < rounds; ++round) te::ThrowInSomeRanges(pool, random);
  for (int round = 0; round < rounds / 50; ++round) te::AskForValuesOfDevices(seed + round);
}
