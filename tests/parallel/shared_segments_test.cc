// Segments that several processes share, here those of one process. A participant that waits for the others fails at
// once when one of them gives up, and names those that did not arrive in time; a participant of another host is
// refused, and so is more memory than the system has. Exits with 0 if all went well.

#include "collective_gemm/shared_segments.h"

#include <sys/statvfs.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

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
Status OpenSegment(int, int64_t, const std::string&, std::unique_ptr<Segment>&) {
  return Status::Failed("of one process");
}

namespace {

using std::chrono::seconds;

void Check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

struct Attempt {
  Attempt(int number, int size) : participants(size), number(number) {
    for (int rank = 0; rank < size; ++rank) participants[rank] = rank;
    for (int rank = 0; rank < size; ++rank) {
      segments.emplace_back();
      Check(SharedSegments::Create(participants, rank, rank, 64, segments.back()).ok(), "segments cannot be created");
      KeepAttempt(participants, number, rank, segments.back());
      texts.push_back(segments.back()->Describe());
    }
  }
  // How many of the first `count` participants have joined.
  int Join(int count, const std::function<void()>& meanwhile) {
    std::atomic<int> joined{0};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < count; ++rank) {
      threads.emplace_back([&, rank] { joined += segments[rank]->Join(texts, seconds(600)).ok(); });
    }
    meanwhile();
    for (std::thread& thread : threads) thread.join();
    ForgetAttempt(participants, number);
    return joined;
  }

  std::vector<int> participants;
  int number;
  std::vector<std::shared_ptr<SharedSegments>> segments;
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
    std::vector<int> missing;
    attempt.segments[1]->Barrier(seconds(600), missing);
  });
  Check(attempt.segments[0]->Barrier(seconds(600), absent), "segments that were joined are broken");
  other.join();
}

void TestATimeoutNamesTheAbsent() {
  for (int i = 0; i < 300; ++i) {
    Attempt attempt(3, 2);
    Check(attempt.Join(2, [] {}) == 2, "participants that have all arrived have not joined");
    std::vector<int> absent, missing;
    const auto begin = std::chrono::steady_clock::now();
    std::thread late([&] {  // about when the other gives up
      while (std::chrono::steady_clock::now() - begin < std::chrono::microseconds(150 + i)) {
      }
      attempt.segments[1]->Barrier(seconds(600), missing);
    });
    const bool met = attempt.segments[0]->Barrier(std::chrono::microseconds(200), absent);
    late.join();
    Check(met || absent == std::vector<int>{1}, "the barrier failed, and nobody is absent");
  }
}

void TestParticipantsOfAnotherHostAreRefused() {
  Attempt attempt(4, 2);
  attempt.texts[1].insert(0, "another-");
  Check(attempt.Join(2, [] {}) == 0, "a participant of another host has joined");
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
  return 0;
}
