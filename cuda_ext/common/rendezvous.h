// Where the host threads that drive several devices meet: each brings something, and all leave with what all brought.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "common/status.h"

namespace te {

// A meeting is one occurrence of one call in one execution of a program. Members are in the order of their ranks.
struct MeetingKey {
  int64_t run;   // of the execution: the same on all of its devices
  int64_t call;  // of the call in its program
  int stage;     // of the call: it may meet several times
  std::vector<int> members;

  friend bool operator<(const MeetingKey& a, const MeetingKey& b) {
    return std::tie(a.run, a.call, a.stage, a.members) < std::tie(b.run, b.call, b.stage, b.members);
  }
};

template <typename T>
class Rendezvous {
 public:
  // Waits until every member has come. Nobody can come for the second time before all have come for the first, so a
  // call that a loop repeats needs no number of its own.
  //
  // Fails for all members when one of them has not come in time, if there is a limit; `absent` then holds the members
  // that nobody has seen.
  bool Meet(const MeetingKey& key, int rank, T brought, std::optional<std::chrono::nanoseconds> timeout,
            std::vector<T>& all, std::vector<int>& absent) {
    const auto start = std::chrono::steady_clock::now();
    std::shared_ptr<Meeting> meeting = Enter(key);
    std::unique_lock lock(meeting->mutex);
    meeting->brought[rank] = std::move(brought);
    if (++meeting->arrived == key.members.size()) {
      Forget(key, meeting);
      meeting->complete.store(!meeting->failed, std::memory_order_release);
      meeting->changed.notify_all();
    } else if (!meeting->failed) {
      lock.unlock();
      const bool soon = SpinFor(kSpin, [&] { return meeting->complete.load(std::memory_order_acquire); });
      lock.lock();
      const auto settled = [&] { return meeting->complete || meeting->failed; };
      if (!soon && timeout) {
        meeting->changed.wait_until(lock, start + *timeout, settled);
      } else if (!soon) {
        meeting->changed.wait(lock, settled);
      }
    }
    if (!meeting->complete) {
      if (!meeting->failed) {
        meeting->failed = true;  // those who come later learn at once
        for (size_t i = 0; i < key.members.size(); ++i) {
          if (!meeting->brought[i]) meeting->absent.push_back(key.members[i]);
        }
        meeting->changed.notify_all();
      }
      absent = meeting->absent;
      return false;
    }
    all.clear();
    for (const std::optional<T>& one : meeting->brought) all.push_back(*one);
    return true;
  }

 private:
  // Waking a thread takes longer than most waits, where there are cores to spare.
  static constexpr std::chrono::microseconds kSpin{50};

  struct Meeting {
    explicit Meeting(size_t members) : brought(members) {}
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::optional<T>> brought;
    size_t arrived = 0;
    std::atomic<bool> complete{false};
    bool failed = false;
    std::vector<int> absent;
  };

  std::shared_ptr<Meeting> Enter(const MeetingKey& key) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Meeting>& meeting = meetings_[key];
    if (meeting == nullptr) meeting = std::make_shared<Meeting>(key.members.size());
    return meeting;
  }

  void Forget(const MeetingKey& key, const std::shared_ptr<Meeting>& meeting) {
    const std::lock_guard lock(mutex_);
    const auto found = meetings_.find(key);
    if (found != meetings_.end() && found->second == meeting) meetings_.erase(found);
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
  std::map<MeetingKey, std::shared_ptr<Meeting>> meetings_;
};

}  // namespace te
