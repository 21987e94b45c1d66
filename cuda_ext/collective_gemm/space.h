// What the members of a group share whose devices are driven by several processes of one host: a barrier, and memory of
// every device that the others can reach. Made once for a group, and larger ones as calls need them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"

namespace te::collective_gemm {

constexpr int kMostMembers = 64;

// Devices are known by places, the same in all processes: the number of the process that drives it in the upper bits,
// and its number among the devices of that in the lower 16.
inline int ProcessOf(int place) { return place >> 16; }
inline int NumberOf(int place) { return place & 0xffff; }

// What XLA calls the devices of this process: ordinals, by place.
void SetOrdinals(const std::map<int, int>& ordinals);
// The ordinal of a place of this process, or -1.
int OrdinalOf(int place);
// The place of an ordinal, or -1.
int PlaceOf(int ordinal);

// In memory that is mapped by all processes.
struct SharedBarrier {
  std::atomic<uint32_t> broken;
  struct alignas(64) Member {
    std::atomic<uint64_t> arrived;
  };
  Member members[kMostMembers];
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
};

// A file in shared memory, mapped. Its name is gone once all have mapped it.
class SharedMemory {
 public:
  static Status Create(int64_t bytes, std::unique_ptr<SharedMemory>& made);
  static Status Open(const std::string& name, int64_t bytes, std::unique_ptr<SharedMemory>& opened);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void* data() const { return data_; }
  const std::string& name() const { return name_; }
  void Unlink();

 private:
  SharedMemory(std::string name, void* data, int64_t bytes) : name_(std::move(name)), data_(data), bytes_(bytes) {}

  std::string name_;
  void* data_;
  int64_t bytes_;
  bool linked_ = false;
};

// A device's memory for the others, and the two marks that it places: platforms know how.
class Reach {
 public:
  virtual ~Reach() = default;
  // As text that another process can be given.
  virtual std::string Describe() const = 0;
  virtual void* data() const = 0;
  virtual void* mark(int stage) const = 0;
  virtual void Announced() {}  // all others have it
};

Status MakeReach(int device, int64_t bytes, std::unique_ptr<Reach>& made);
// Of a device of another process.
Status OpenReach(int device, int64_t bytes, const std::string& description, std::unique_ptr<Reach>& opened);

class Space {
 public:
  // `members` are places, and this process drives the one of `rank`.
  static Status Make(std::vector<int> members, int rank, int device, int64_t bytes, std::shared_ptr<Space>& made);

  // What the other members need of this one.
  std::string Describe() const;
  // With what every member, in order of rank, says of itself. Waits until all have come.
  Status Join(const std::vector<std::string>& descriptions, std::chrono::nanoseconds timeout);

  // As Rendezvous::Meet. Once somebody was missing, members may have counted their meetings differently: every later
  // one fails at once, with nobody absent.
  bool Meet(std::chrono::nanoseconds timeout, std::vector<int>& absent);
  // For a member that cannot come: the others learn at once.
  void Break() {
    if (SharedBarrier* const barrier = barrier_) barrier->broken.store(1);
  }
  bool joined() const { return joined_; }

  int64_t bytes() const { return bytes_; }
  char* data(int rank) const { return static_cast<char*>(reaches_[rank]->data()); }
  void* mark(int rank, int stage) const { return reaches_[rank]->mark(stage); }

 private:
  Space() = default;

  std::vector<int> members_;
  int rank_ = 0;
  int device_ = 0;
  int64_t bytes_ = 0;
  uint64_t meetings_ = 0;
  std::unique_ptr<SharedMemory> barrier_memory_;
  std::atomic<SharedBarrier*> barrier_{nullptr};  // null while it is not mapped, when another thread may break it
  std::atomic<bool> joined_{false};
  std::vector<std::shared_ptr<Reach>> reaches_;  // by rank
};

// A member's spaces: while a group opens one it is known by a number; once all have joined it serves their calls.
void KeepOpening(const std::vector<int>& members, int number, int rank, std::shared_ptr<Space> space);
std::shared_ptr<Space> FindOpening(const std::vector<int>& members, int number, int rank);
// One that was not joined is broken: members that wait for it learn at once.
void ForgetOpening(const std::vector<int>& members, int number);
void KeepSpace(const std::vector<int>& members, int rank, std::shared_ptr<Space> space);
// The first that is large enough, or null. The same for all members: they have joined theirs in the same order.
std::shared_ptr<Space> FindSpace(const std::vector<int>& members, int rank, int64_t bytes);
// All that calls may find; those that are running keep theirs.
void ForgetSpaces();

}  // namespace te::collective_gemm
