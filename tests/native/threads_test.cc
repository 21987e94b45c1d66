// What threads of the extensions share. Bodies of `ParallelFor` throw in some ranges: no thread may be inside the body,
// or use what the caller has, once it has returned, and the caller gets one of the exceptions. Exits with 0 if all went
// well.

#include <algorithm>
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

}  // namespace
}  // namespace te

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  const unsigned seed = argc > 2 ? std::atoi(argv[2]) : 0;
  std::mt19937 random(seed);
  te::Pool pool(4);
  for (int round = 0; round < rounds; ++round) te::ThrowInSomeRanges(pool, random);
}
