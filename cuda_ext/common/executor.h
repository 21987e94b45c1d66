// Where an operation runs: a CUDA stream, or a pool of CPU threads. Entry points take one and know nothing of XLA.
#pragma once

#ifdef TE_JAX_CUDA

#include <cuda_runtime_api.h>

namespace te {

struct Executor {
  cudaStream_t stream;
};

}  // namespace te

#else

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

namespace te {

class Executor {
 public:
  using Schedule = std::function<void(std::function<void()>)>;

  Executor(int64_t threads, Schedule schedule) : threads_(threads), schedule_(std::move(schedule)) {}

  // Calls body(begin, end) on disjoint ranges that cover [0, count), each of at most `grain` items, and returns when
  // all are done. The caller works too and waits only for ranges that some thread has already begun, so it cannot
  // deadlock when every thread of the pool is itself inside a handler. Where the body throws, ranges that have not
  // begun are left out, and the caller throws the first exception once no thread is inside the body any longer.
  template <typename Body>
  void ParallelFor(int64_t count, int64_t grain, const Body& body) const {
    if (count <= 0) return;
    const int64_t ranges = (count + grain - 1) / grain;
    const int64_t helpers = std::min(threads_, ranges) - 1;
    if (helpers <= 0) return body(int64_t{0}, count);

    struct Progress {
      std::atomic<int64_t> claimed{0};
      std::atomic<int64_t> finished{0};
      std::atomic<bool> failed{false};
      std::exception_ptr error;  // of the thread that has set `failed`
    };
    // A helper that starts after the caller has left finds nothing to claim, but still reads the counter: shared.
    auto progress = std::make_shared<Progress>();
    auto work = [progress, ranges, count, grain, &body] {
      for (int64_t range; (range = progress->claimed.fetch_add(1)) < ranges;) {
        try {
          if (!progress->failed) body(range * grain, std::min(count, (range + 1) * grain));
        } catch (...) {
          if (!progress->failed.exchange(true)) progress->error = std::current_exception();
        }
        if (progress->finished.fetch_add(1, std::memory_order_release) + 1 == ranges) progress->finished.notify_all();
      }
    };
    try {
      for (int64_t i = 0; i < helpers; ++i) schedule_(work);
    } catch (...) {
      // The helpers there are, and the caller, do all.
    }
    work();
    for (int64_t done; (done = progress->finished.load(std::memory_order_acquire)) < ranges;) {
      progress->finished.wait(done, std::memory_order_acquire);
    }
    if (progress->failed) std::rethrow_exception(std::exchange(progress->error, nullptr));
  }

 private:
  int64_t threads_;
  Schedule schedule_;
};

}  // namespace te

#endif
