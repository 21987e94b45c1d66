// A rendezvous of the host threads that drive several devices: each contributes a value, and all receive all values.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
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

// Why a rendezvous failed. Both are empty where a participant arrived twice.
struct Failure {
  std::vector<int> absent;
  std::string difference;  // of two participants that wait for each other, each in a rendezvous of its own
};

template <typename T>
class Rendezvous {
 public:
  using Describe = std::string (*)(const T&, const T&);

  // `one_by_one`: whether a participant is in one rendezvous of a run at a time.
  Rendezvous(bool one_by_one, Describe describe) : one_by_one_(one_by_one), describe_(describe) {}

  // Waits until every participant has arrived. None can arrive for the second time before all have arrived for the
  // first, so a call that a loop repeats needs no number of its own.
  //
  // Without a timeout it waits as long as it takes. With one it fails for all participants
  //
  //   - when one of them does not arrive in time;
  //   - when participants wait for each other in different rendezvous, as after different branches: then all
  //     rendezvous of the run fail that have a timeout, later ones too, and all with one description;
  //   - when one arrives twice: two calls then have one key.
  //
  // Where participants come one by one, such a circle is found when it closes. Otherwise a participant may be on its
  // way to several rendezvous, and the circle may open again: it counts once this process does nothing any more, or
  // when the time is over.
  bool Join(const RendezvousKey& key, int rank, T value, std::optional<std::chrono::nanoseconds> timeout,
            std::vector<T>& all, Failure& failure) {
    const auto start = Clock::now();
    std::unique_lock lock(mutex_);
    if (const std::string* const difference = timeout ? DifferenceOf(key.run) : nullptr) {
      failure = {{}, *difference};
      return false;
    }
    std::shared_ptr<State>& entry = states_[key];
    if (entry == nullptr) entry = std::make_shared<State>(key.participants.size(), timeout.has_value());
    const std::shared_ptr<State> state = entry;
    const bool twice = state->values[rank].has_value();
    if (!twice) {
      state->values[rank] = std::move(value);
      if (++state->arrived == key.participants.size()) {
        Erase(key, state);
        state->complete.store(!state->failed, std::memory_order_release);
        state->changed.notify_all();
      } else if (!state->failed) {
        Wait(lock, key, *state, start, timeout);
      }
    }
    if (twice || !state->complete) {
      if (!state->complete && !state->failed) {
        for (size_t i = 0; !twice && i < key.participants.size(); ++i) {
          if (!state->values[i]) state->failure.absent.push_back(key.participants[i]);
        }
        state->failed = true;  // participants that arrive later fail at once
        KeepAsFailed(key, state);
        state->changed.notify_all();
      }
      failure = state->failure;
      return false;
    }
    all.clear();
    for (const std::optional<T>& one : state->values) all.push_back(*one);
    return true;
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Waking a thread takes longer than most waits, where there are cores to spare.
  static constexpr std::chrono::microseconds kSpin{50};
  static constexpr size_t kFailedKept = 128;
  // A process that does nothing works for less than a fiftieth of this time.
  static constexpr std::chrono::milliseconds kQuiet{500};
  static constexpr std::clock_t kWorkWhileQuiet = CLOCKS_PER_SEC / 100;

  struct State {
    State(size_t participants, bool may_fail) : values(participants), may_fail(may_fail) {}
    std::condition_variable changed;
    std::vector<std::optional<T>> values;
    const bool may_fail;
    size_t arrived = 0;
    std::atomic<bool> complete{false};
    bool failed = false;
    Failure failure;
  };
  using States = std::map<RendezvousKey, std::shared_ptr<State>>;
  using Entry = typename States::value_type;

  // Until all have arrived, the rendezvous has failed, or the time is over.
  void Wait(std::unique_lock<std::mutex>& lock, const RendezvousKey& key, State& state, Clock::time_point start,
            std::optional<std::chrono::nanoseconds> timeout) {
    const auto settled = [&] { return state.complete || state.failed; };
    if (one_by_one_ && FailInCircle(key)) return;
    lock.unlock();
    const bool soon = SpinFor(kSpin, [&] { return state.complete.load(std::memory_order_acquire); });
    lock.lock();
    if (soon) return;
    if (!timeout) return state.changed.wait(lock, settled);
    const auto end = start + *timeout;
    while (!settled()) {
      const bool circle = BeginOfCircle(key).has_value();
      const std::clock_t worked = std::clock();
      if (state.changed.wait_until(lock, std::min(end, Clock::now() + kQuiet), settled)) return;
      const bool over = Clock::now() >= end;
      if (over || (circle && std::clock() - worked < kWorkWhileQuiet)) FailInCircle(key);
      if (over) return;
    }
  }

  // Two participants next to each other in a circle: the second one waits elsewhere, and the first one for it.
  struct Pair {
    T first, second;
  };

  // The first pair of a circle through the rendezvous of this key, or none.
  std::optional<Pair> BeginOfCircle(const RendezvousKey& key) const {
    const auto here = states_.find(key);
    if (here == states_.end()) return std::nullopt;
    std::set<const Entry*> seen;
    for (auto there = BeginOfRun(key.run); there != states_.end() && there->first.run == key.run; ++there) {
      const std::optional<T>* const second = WaitsElsewhere(*here, *there);
      if (second == nullptr || !Reaches(*there, *here, seen)) continue;
      const std::optional<T>* first = WaitsElsewhere(*there, *here);
      if (first == nullptr) first = &*std::ranges::find_if(here->second->values, &std::optional<T>::has_value);
      return Pair{**first, **second};
    }
    return std::nullopt;
  }

  // Whether `from` cannot be complete before `goal`.
  bool Reaches(const Entry& from, const Entry& goal, std::set<const Entry*>& seen) const {
    if (&from == &goal) return true;
    if (!seen.insert(&from).second) return false;
    for (auto next = BeginOfRun(goal.first.run); next != states_.end() && next->first.run == goal.first.run; ++next) {
      if (WaitsElsewhere(from, *next) != nullptr && Reaches(*next, goal, seen)) return true;
    }
    return false;
  }

  // The first participant that waits there and has yet to come here, or null.
  static const std::optional<T>* WaitsElsewhere(const Entry& here, const Entry& there) {
    if (!here.second->may_fail || !there.second->may_fail || there.second->failed) return nullptr;
    for (size_t i = 0; i < there.first.participants.size(); ++i) {
      const auto found = std::ranges::find(here.first.participants, there.first.participants[i]);
      if (!there.second->values[i] || found == here.first.participants.end()) continue;
      if (!here.second->values[found - here.first.participants.begin()]) return &there.second->values[i];
    }
    return nullptr;
  }

  // Fails all rendezvous of the run that may fail, if the one of this key is part of a circle.
  bool FailInCircle(const RendezvousKey& key) {
    const std::optional<Pair> pair = BeginOfCircle(key);
    if (!pair) return false;
    const std::string difference = describe_(pair->first, pair->second);
    for (auto one = BeginOfRun(key.run); one != states_.end() && one->first.run == key.run;) {
      State& state = *one->second;
      if (!state.may_fail || state.failed) {
        ++one;
        continue;
      }
      state.failed = true;
      state.failure.difference = difference;
      state.changed.notify_all();
      one = states_.erase(one);
    }
    differences_.emplace_back(key.run, difference);
    if (differences_.size() > kFailedKept) differences_.pop_front();
    return true;
  }

  const std::string* DifferenceOf(int64_t run) const {
    const auto found = std::ranges::find(differences_, run, &std::pair<int64_t, std::string>::first);
    return found == differences_.end() ? nullptr : &found->second;
  }

  auto BeginOfRun(int64_t run) const { return states_.lower_bound({run, INT64_MIN, INT_MIN, {}}); }

  void Erase(const RendezvousKey& key, const std::shared_ptr<State>& state) {
    const auto found = states_.find(key);
    if (found != states_.end() && found->second == state) states_.erase(found);
  }

  // A participant that arrives late must find that the others have failed, and one that never arrives would leave the
  // record for good: only the last ones are kept.
  void KeepAsFailed(const RendezvousKey& key, const std::shared_ptr<State>& state) {
    failed_.emplace_back(key, state);
    if (failed_.size() <= kFailedKept) return;
    Erase(failed_.front().first, failed_.front().second);
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

  const bool one_by_one_;
  const Describe describe_;
  std::mutex mutex_;  // of all that follows
  States states_;     // of those that are not complete
  std::deque<std::pair<RendezvousKey, std::shared_ptr<State>>> failed_;
  std::deque<std::pair<int64_t, std::string>> differences_;  // by run
};

}  // namespace te
