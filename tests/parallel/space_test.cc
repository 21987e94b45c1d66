// Spaces of several processes, here of one: who waits while a space is opened learns at once that a member has given it
// up, a member that waited too long says for whom, one of another host is refused, and memory that is not there is not
// shared. Exits with 0 if all went well.

#include "collective_gemm/space.h"

#include <sys/statvfs.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

namespace te::collective_gemm {
namespace {

struct NoMemory : Reach {
  std::string Describe() const override { return "none"; }
  void* data() const override { return nullptr; }
  void* mark(int) const override { return nullptr; }
};

}  // namespace

Status MakeReach(int, int64_t, std::unique_ptr<Reach>& made) {
  made = std::make_unique<NoMemory>();
  return Status::Ok();
}
Status OpenReach(int, int64_t, const std::string&, std::unique_ptr<Reach>&) { return Status::Failed("of one process"); }

namespace {

using std::chrono::seconds;

void Check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

struct Opening {
  Opening(int number, int size) : members(size), number(number) {
    for (int rank = 0; rank < size; ++rank) members[rank] = rank;
    for (int rank = 0; rank < size; ++rank) {
      spaces.emplace_back();
      Check(Space::Make(members, rank, rank, 64, spaces.back()).ok(), "a space cannot be made");
      KeepOpening(members, number, rank, spaces.back());
      texts.push_back(spaces.back()->Describe());
    }
  }
  // How many of the first `count` members have joined.
  int Join(int count, const std::function<void()>& meanwhile) {
    std::atomic<int> joined{0};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < count; ++rank) {
      threads.emplace_back([&, rank] { joined += spaces[rank]->Join(texts, seconds(600)).ok(); });
    }
    meanwhile();
    for (std::thread& thread : threads) thread.join();
    ForgetOpening(members, number);
    return joined;
  }

  std::vector<int> members;
  int number;
  std::vector<std::shared_ptr<Space>> spaces;
  std::vector<std::string> texts;
};

void TestMembersThatWaitLearnThatOneGaveUp() {
  Opening opening(1, 3);
  const int joined = opening.Join(2, [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ForgetOpening(opening.members, opening.number);
  });
  Check(joined == 0, "members have joined without the one that gave up");
}

void TestJoinedSpacesAreKept() {
  Opening opening(2, 2);
  Check(opening.Join(2, [] {}) == 2, "members that have all come have not joined");
  std::vector<int> absent;
  std::thread other([&] {
    std::vector<int> missing;
    opening.spaces[1]->Meet(seconds(600), missing);
  });
  Check(opening.spaces[0]->Meet(seconds(600), absent), "a space that was joined is broken");
  other.join();
}

void TestWhoWaitsTooLongSaysForWhom() {
  for (int i = 0; i < 300; ++i) {
    Opening opening(3, 2);
    Check(opening.Join(2, [] {}) == 2, "members that have all come have not joined");
    std::vector<int> absent, missing;
    const auto begin = std::chrono::steady_clock::now();
    std::thread late([&] {  // about when the other gives up
      while (std::chrono::steady_clock::now() - begin < std::chrono::microseconds(150 + i)) {
      }
      opening.spaces[1]->Meet(seconds(600), missing);
    });
    const bool met = opening.spaces[0]->Meet(std::chrono::microseconds(200), absent);
    late.join();
    Check(met || absent == std::vector<int>{1}, "nobody is missing, but the members have not met");
  }
}

void TestMembersOfAnotherHostAreRefused() {
  Opening opening(4, 2);
  opening.texts[1].insert(0, "another-");
  Check(opening.Join(2, [] {}) == 0, "a member of another host has joined");
}

void TestMoreMemoryThanThereIsCannotBeShared() {
  struct statvfs system = {};
  Check(statvfs("/dev/shm", &system) == 0, "there is no /dev/shm");
  const int64_t all = static_cast<int64_t>(system.f_blocks * system.f_frsize);
  std::unique_ptr<SharedMemory> memory;
  Check(all == 0 || !SharedMemory::Create(all + (1 << 20), memory).ok(), "more is shared than there is");
  Check(SharedMemory::Create(1 << 20, memory).ok(), "what there is cannot be shared");
}

}  // namespace
}  // namespace te::collective_gemm

int main() {
  te::collective_gemm::TestMembersThatWaitLearnThatOneGaveUp();
  te::collective_gemm::TestJoinedSpacesAreKept();
  te::collective_gemm::TestWhoWaitsTooLongSaysForWhom();
  te::collective_gemm::TestMembersOfAnotherHostAreRefused();
  te::collective_gemm::TestMoreMemoryThanThereIsCannotBeShared();
  return 0;
}
