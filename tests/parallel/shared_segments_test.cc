// Segments that several processes share, here those of one process. A participant that waits for the others fails at
// once when one of them gives up, and names those that did not arrive in time; a participant of another host is
// refused, and so is more memory than the system has. The rendezvous of one process forgets calls that failed, and
// finds participants that wait for each other. Exits with 0 if all went well.

#include "collective_gemm/shared_segments.h"

#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

#include "common/rendezvous.h"

namespace te::collective_gemm {
namespace {

struct NoMemory : Segment {
  std::string Describe() const override { return "none"; }
  void* data() const override { return nullptr; }
  void* event(int) const override { return nullptr; }
};

}  // namespace

Status CreateSegment(int, int64_t, std::unique_ptr<Segment>& made) {
  made = std::make_unique<NoMemory>();
  return Status::Ok();
}
Status OpenSegment(int, int64_t, const std::string&, std::unique_ptr<Segment>& opened) {
  opened = std::make_unique<NoMemory>();
  return Status::Ok();
}

namespace {

using std::chrono::seconds;

void Check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

struct Attempt {
  // Devices of one process, or of one each.
  Attempt(int number, int size, bool one_process = true) : participants(size), number(number), locals(size) {
    for (int rank = 0; rank < size; ++rank) participants[rank] = one_process ? rank : rank << 16;
    for (int rank = 0; rank < size; ++rank) {
      segments.emplace_back();
      Check(SharedSegments::Create(participants, rank, rank, 64, segments.back()).ok(), "segments cannot be created");
      KeepAttempt(participants, number, rank, segments.back());
      texts.push_back(segments.back()->Describe());
    }
    if (one_process) locals = segments;
  }
  // How many of the first `count` participants have joined.
  int Join(int count, const std::function<void()>& meanwhile) {
    std::atomic<int> joined{0};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < count; ++rank) {
      threads.emplace_back([&, rank] { joined += segments[rank]->Join(texts, locals, seconds(600)).ok(); });
    }
    meanwhile();
    for (std::thread& thread : threads) thread.join();
    ForgetAttempt(participants, number);
    return joined;
  }

  std::vector<int> participants;
  int number;
  std::vector<std::shared_ptr<SharedSegments>> segments, locals;
  std::vector<std::string> texts;
};

void TestParticipantsThatWaitFailWhenOneGivesUp() {
  Attempt attempt(1, 3);
  const int joined = attempt.Join(2, [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ForgetAttempt(attempt.participants, attempt.number);
  });
  Check(joined == 0, "participants have joined without the one that gave up");
}

void TestJoinedSegmentsAreKept() {
  Attempt attempt(2, 2);
  Check(attempt.Join(2, [] {}) == 2, "participants that have all arrived have not joined");
  std::vector<int> absent;
  std::thread other([&] {
    std::vector<Terms> terms;
    std::vector<int> missing;
    attempt.segments[1]->Barrier({}, seconds(600), terms, missing);
  });
  std::vector<Terms> terms;
  Check(attempt.segments[0]->Barrier({}, seconds(600), terms, absent), "segments that were joined are broken");
  other.join();
}

void TestATimeoutNamesTheAbsent() {
  for (int i = 0; i < 300; ++i) {
    Attempt attempt(3, 2);
    Check(attempt.Join(2, [] {}) == 2, "participants that have all arrived have not joined");
    std::vector<Terms> terms, other_terms;
    std::vector<int> absent, missing;
    const auto begin = std::chrono::steady_clock::now();
    std::thread late([&] {  // about when the other gives up
      while (std::chrono::steady_clock::now() - begin < std::chrono::microseconds(150 + i)) {
      }
      attempt.segments[1]->Barrier({}, seconds(600), other_terms, missing);
    });
    const bool met = attempt.segments[0]->Barrier({}, std::chrono::microseconds(200), terms, absent);
    late.join();
    Check(met || absent == std::vector<int>{1}, "the barrier failed, and nobody is absent");
  }
}

void TestParticipantsOfAnotherHostAreRefused() {
  Attempt attempt(4, 2, false);
  attempt.texts[1].insert(0, "another-");
  Check(attempt.Join(2, [] {}) == 0, "a participant of another host has joined");
}

// Each sees what the others have brought to this barrier, however soon they bring something else to the next one. Where
// it is not the same, all see so, and none can go on.
void TestTermsAreThoseOfThisBarrier() {
  Attempt attempt(5, 3, false);
  Check(attempt.Join(3, [] {}) == 3, "participants that have all arrived have not joined");
  constexpr int64_t kBarriers = 3000;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      std::vector<Terms> all;
      std::vector<int> absent;
      for (int64_t i = 0; i < kBarriers; ++i) {
        const Terms mine{i, -i};
        Check(attempt.segments[rank]->Barrier(mine, seconds(600), all, absent), "a barrier is broken");
        Check(all == std::vector<Terms>(3, mine), "terms are those of another barrier");
      }
      Check(attempt.segments[rank]->Barrier({rank}, seconds(600), all, absent), "terms that differ are not brought");
      Check(all == std::vector<Terms>{{0}, {1}, {2}}, "terms that differ are lost");
      Check(!attempt.segments[rank]->Barrier({}, seconds(600), all, absent), "participants that differ have gone on");
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// By files alone: a child that inherits what is open must not keep its parent alive.
void TestAProcessThatHasEndedIsNotWaitedFor() {
  int ends[2];
  Check(pipe(ends) == 0, "no pipe");
  const pid_t child = fork();
  if (child == 0) {
    std::shared_ptr<SharedSegments> peer;
    Check(SharedSegments::Create({0, 1 << 16}, 1, 0, 64, peer).ok(), "segments cannot be created");
    if (fork() == 0) {
      sleep(2);
      _exit(0);
    }
    const std::string text = peer->Describe();
    Check(write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()), "no text");
    _exit(0);  // as killed: nothing is cleaned up
  }
  char text[4096];
  const ssize_t length = read(ends[0], text, sizeof(text));
  Check(length > 0 && waitpid(child, nullptr, 0) == child, "no text");
  std::shared_ptr<SharedSegments> segments;
  Check(SharedSegments::Create({0, 1 << 16}, 0, 0, 64, segments).ok(), "segments cannot be created");
  const auto begin = std::chrono::steady_clock::now();
  const Status status =
      segments->Join({segments->Describe(), std::string(text, length)}, {segments, nullptr}, seconds(60));
  Check(status.reason().find("device 0 of process 1") != std::string::npos, "the process that ended is not named");
  Check(status.reason().find("has ended") != std::string::npos, "nothing says that a process has ended");
  Check(std::chrono::steady_clock::now() - begin < seconds(2), "a process that has ended is waited for");
  close(ends[0]);
  close(ends[1]);
}

void TestRendezvousThatFailedAreForgotten() {
  using Value = std::shared_ptr<int>;
  Rendezvous<Value> rendezvous(true, [](const Value&, const Value&) { return std::string("a difference"); });
  const auto value = std::make_shared<int>(0);
  std::vector<Value> all;
  Failure failure;
  const auto join = [&](int64_t run, int rank, std::chrono::nanoseconds timeout) {
    return rendezvous.Join(RendezvousKey{run, 1, 0, {4, 5}}, rank, value, timeout, all, failure);
  };
  for (int run = 0; run < 1000; ++run) {
    Check(!join(run, 0, std::chrono::nanoseconds(0)) && failure.absent == std::vector<int>{5},
          "a call did not time out");
  }
  Check(value.use_count() < 200, "calls that failed are kept for good");
  Check(!join(999, 1, seconds(600)) && failure.absent == std::vector<int>{5},
        "a participant that is late waits for the others");
}

std::string Both(const int& first, const int& second) { return std::to_string(first) + std::to_string(second); }

// One of several participants, each with a thread of its own, whose value is its number.
struct Arrival {
  int participant;
  int64_t call;
  std::vector<int> group;
  std::chrono::milliseconds late = {};  // of which it works all the time
};

// The differences that participants of one run hear of, in the order of their arrivals; empty of those that met.
std::vector<std::string> Differences(bool one_by_one, const std::vector<Arrival>& arrivals,
                                     std::chrono::nanoseconds timeout) {
  Rendezvous<int> rendezvous(one_by_one, Both);
  std::vector<std::string> differences(arrivals.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < arrivals.size(); ++i) {
    threads.emplace_back([&, i] {
      const Arrival& arrival = arrivals[i];
      const auto begin = std::chrono::steady_clock::now();
      while (std::chrono::steady_clock::now() - begin < arrival.late) continue;
      std::vector<int> all;
      Failure failure;
      const auto rank = std::find(arrival.group.begin(), arrival.group.end(), arrival.participant);
      const bool met =
          rendezvous.Join(RendezvousKey{1, arrival.call, 0, arrival.group},
                          static_cast<int>(rank - arrival.group.begin()), arrival.participant, timeout, all, failure);
      Check(met || !failure.difference.empty(), "a participant is not told of a difference");
      differences[i] = failure.difference;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return differences;
}

void TestParticipantsThatWaitForEachOther() {
  using std::chrono::milliseconds;
  const std::vector<int> all{4, 5, 6, 7};
  const std::vector<std::vector<Arrival>> circles{
      {{4, 1, all}, {5, 1, all}, {6, 2, all}, {7, 3, all, milliseconds(100)}},           // the last one comes later
      {{4, 1, {4, 5}}, {5, 2, {5, 6}}, {6, 3, {6, 7}}, {7, 4, {7, 4}}},                  // each waits for the next one
      {{4, 1, {4, 5}}, {5, 2, all}, {6, 2, all, milliseconds(100)}, {7, 3, {4, 7, 8}}},  // one waits for the circle
  };
  for (const bool one_by_one : {true, false}) {
    for (const std::vector<Arrival>& circle : circles) {
      const std::vector<std::string> differences = Differences(one_by_one, circle, seconds(600));
      Check(differences[0].size() == 2 && differences[0][0] != differences[0][1], "no two participants are named");
      for (const std::string& other : differences)
        Check(other == differences[0], "participants are told different things");
    }
  }
  const std::vector<Arrival> chain{
      {4, 1, {4, 5}}, {5, 2, {5, 6}}, {6, 2, {5, 6}, milliseconds(100)}, {5, 1, {4, 5}, milliseconds(200)}};
  // Whoever comes one by one leaves a rendezvous before it joins the next one.
  for (const std::string& difference : Differences(true, chain, seconds(600))) {
    Check(difference.empty(), "a participant that waits for another is taken for one that differs");
  }
  const std::vector<Arrival> crossed{
      {4, 1, {4, 5}}, {5, 2, {4, 5}}, {4, 2, {4, 5}, milliseconds(1500)}, {5, 1, {4, 5}, milliseconds(1500)}};
  for (const std::string& difference : Differences(false, crossed, seconds(600))) {
    Check(difference.empty(), "participants that still work are taken for ones that differ");
  }
  std::vector<Arrival> busy(crossed.begin(), crossed.begin() + 2);
  busy.push_back({6, 3, {6}, milliseconds(1500)});
  const std::vector<std::string> differences = Differences(false, busy, milliseconds(300));
  Check(!differences[0].empty() && differences[0] == differences[1], "a timeout does not tell what differs");
}

void TestAParticipantThatArrivesTwice() {
  Rendezvous<int> rendezvous(true, Both);
  const RendezvousKey key{1, 1, 0, {4, 5}};
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      std::vector<int> all;
      Failure failure;
      failed += !rendezvous.Join(key, 0, 0, seconds(600), all, failure) && failure.absent.empty();
    });
  }
  for (std::thread& thread : threads) thread.join();
  Check(failed == 2, "a participant has met itself");
}

void TestMoreMemoryThanThereIsCannotBeShared() {
  struct statvfs system = {};
  Check(statvfs("/dev/shm", &system) == 0, "there is no /dev/shm");
  const int64_t all = static_cast<int64_t>(system.f_blocks * system.f_frsize);
  std::unique_ptr<SharedMemory> memory;
  Check(all == 0 || !SharedMemory::Create(all + (1 << 20), memory).ok(), "more memory is shared than the system has");
  Check(SharedMemory::Create(1 << 20, memory).ok(), "memory that the system has cannot be shared");
}

}  // namespace
}  // namespace te::collective_gemm

int main() {
  te::collective_gemm::TestParticipantsThatWaitFailWhenOneGivesUp();
  te::collective_gemm::TestJoinedSegmentsAreKept();
  te::collective_gemm::TestATimeoutNamesTheAbsent();
  te::collective_gemm::TestParticipantsOfAnotherHostAreRefused();
  te::collective_gemm::TestMoreMemoryThanThereIsCannotBeShared();
  te::collective_gemm::TestTermsAreThoseOfThisBarrier();
  te::collective_gemm::TestAProcessThatHasEndedIsNotWaitedFor();
  te::collective_gemm::TestRendezvousThatFailedAreForgotten();
  te::collective_gemm::TestParticipantsThatWaitForEachOther();
  te::collective_gemm::TestAParticipantThatArrivesTwice();
  return 0;
}
