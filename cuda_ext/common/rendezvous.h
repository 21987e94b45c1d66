// A rendezvous of the host threads that drive several devices: each contributes a value, and all receive all values.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace te {

struct RendezvousKey {
  int64_t run;                    // of the execution: the same on all of its devices
  int64_t call;                   // of the call in its program
  int stage;                      // a call may need several rendezvous
  std::vector<int> participants;  // by rank

  friend bool operator<(const RendezvousKey& a, const RendezvousKey& b) {
    return std::tie(a.run, a.call, a.stage, a.participants) < std::tie(b.run, b.call, b.stage, b.participants);
  }
};

template <typename T>
class Rendezvous {
 public:
  // Waits until every participant has arrived. None can arrive for the second time before all have arrived for the
  // first, so a call that a loop repeats needs no number of its own.
  //
  // Fails for all participants when one of them does not arrive within the timeout, if there is one; `absent` then
  // holds those that did not. Fails, with nobody absent, when one arrives twice: two calls then have one key.
  bool Join(const RendezvousKey& key, int rank, T value, std::optional<std::chrono::nanoseconds> timeout,
            std::vector<T>& all, std::vector<int>& absent) {
    const auto start = std::chrono::steady_clock::now();
    std::shared_ptr<State> state = Find(key);
    std::unique_lock lock(state->mutex);
    const bool twice = state->values[rank].has_value();
    if (!twice) state->values[rank] = std::move(value);
    if (!twice && ++state->arrived == key.participants.size()) {
      Erase(key, state);
      state->complete.store(!state->failed, std::memory_order_release);
      state->changed.notify_all();
    } else if (!twice && !state->failed) {
      lock.unlock();
      const bool soon = SpinFor(kSpin, [&] { return state->complete.load(std::memory_order_acquire); });
      lock.lock();
      const auto settled = [&] { return state->complete || state->failed; };
      if (!soon && timeout) {
        state->changed.wait_until(lock, start + *timeout, settled);
      } else if (!soon) {
        state->changed.wait(lock, settled);
      }
    }
    if (twice || !state->complete) {
      if (!state->complete && !state->failed) {
        for (size_t i = 0; !twice && i < key.participants.size(); ++i) {
          if (!state->values[i]) state->absent.push_back(key.participants[i]);
        }
        state->failed = true;  // participants that arrive later fail at once
        KeepAsFailed(key, state);
        state->changed.notify_all();
      }
      absent = state->absent;
      return false;
    }
    all.clear();
    for (const std::optional<T>& one : state->values) all.push_back(*one);
    return true;
  }

 private:
  // Waking a thread takes longer than most waits, where there are cores to spare.
  static constexpr std::chrono::microseconds kSpin{50};
  static constexpr size_t kFailedKept = 128;

  struct State {
    explicit State(size_t participants) : values(participants) {}
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::optional<T>> values;
    size_t arrived = 0;
    std::atomic<bool> complete{false};
    bool failed = false;
    std::vector<int> absent;
  };

  std::shared_ptr<State> Find(const RendezvousKey& key) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<State>& state = states_[key];
    if (state == nullptr) state = std::make_shared<State>(key.participants.size());
    return state;
  }

  void Erase(const RendezvousKey& key, const std::shared_ptr<State>& state) {
    const std::lock_guard lock(mutex_);
    EraseLocked(key, state);
  }

  void EraseLocked(const RendezvousKey& key, const std::shared_ptr<State>& state) {
    const auto found = states_.find(key);
    if (found != states_.end() && found->second == state) states_.erase(found);
  }

  // A participant that arrives late must find that the others have failed, and one that never arrives would leave the
  // record for good: only the last ones are kept.
  void KeepAsFailed(const RendezvousKey& key, const std::shared_ptr<State>& state) {
    const std::lock_guard lock(mutex_);
    failed_.emplace_back(key, state);
    if (failed_.size() <= kFailedKept) return;
    EraseLocked(failed_.front().first, failed_.front().second);
    failed_.pop_front();
  }

  template <typename Condition>
  static bool SpinFor(std::chrono::nanoseconds time, Condition condition) {
    static const bool spare_cores = std::thread::hardware_concurrency() >= 8;
    if (!spare_cores) return condition();
    const auto end = std::chrono::steady_clock::now() + time;
    do {
      if (condition()) return true;
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }

  std::mutex mutex_;
  std::map<RendezvousKey, std::shared_ptr<State>> states_;
  std::deque<std::pair<RendezvousKey, std::shared_ptr<State>>> failed_;
};

}  // namespace te
