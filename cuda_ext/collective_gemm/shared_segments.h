// Memory that the processes of one host share, for a group of devices that several of them drive: a barrier, and a
// segment on every device that its peers can access. Made once for a group, and larger ones as calls need them.
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

constexpr int kMaxParticipants = 64;

// A place names a device in all processes: the number of the process that drives it in the upper bits, and its number
// among the devices of that process in the lower 16.
inline int ProcessOf(int place) { return place >> 16; }
inline int NumberOf(int place) { return place & 0xffff; }

// Sets XLA's ordinals of this process's devices, by place.
void SetOrdinals(const std::map<int, int>& ordinals);
// The ordinal of a place of this process, or -1.
int OrdinalOf(int place);
// The place of an ordinal, or -1.
int PlaceOf(int ordinal);

// Lies in memory that all processes map.
struct SharedBarrier {
  std::atomic<uint32_t> broken;
  struct alignas(64) Participant {
    std::atomic<uint64_t> arrived;
  };
  Participant participants[kMaxParticipants];
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
};

// A file in shared memory, mapped. It is unlinked once all processes have mapped it.
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

// The segment of one device, and the two events that it records for its peers. Each platform implements it.
class Segment {
 public:
  virtual ~Segment() = default;
  virtual std::string Describe() const = 0;  // text from which another process can open it
  virtual void* data() const = 0;
  virtual void* event(int stage) const = 0;
  virtual void AllOpened() {}  // called when all peers have opened it
};

Status CreateSegment(int device, int64_t bytes, std::unique_ptr<Segment>& created);
// Opens the segment of another process's device.
Status OpenSegment(int device, int64_t bytes, const std::string& description, std::unique_ptr<Segment>& opened);

// The segments of a group as one of its participants sees them.
class SharedSegments {
 public:
  // `participants` are places, and this process drives the one of `rank`.
  static Status Create(std::vector<int> participants, int rank, int device, int64_t bytes,
                       std::shared_ptr<SharedSegments>& created);

  // The text that the peers need to open this participant's segment.
  std::string Describe() const;
  // Opens the segments that the texts of all participants, by rank, describe, and waits for all to have done so.
  Status Join(const std::vector<std::string>& descriptions, std::chrono::nanoseconds timeout);

  // Waits as Rendezvous::Join does. After a timeout participants may have counted their barriers differently: every
  // later one fails at once, with nobody absent.
  bool Barrier(std::chrono::nanoseconds timeout, std::vector<int>& absent);
  // Makes the barriers of all participants fail at once.
  void Break() {
    if (SharedBarrier* const barrier = barrier_) barrier->broken.store(1);
  }
  bool joined() const { return joined_; }

  int64_t bytes() const { return bytes_; }
  char* data(int rank) const { return static_cast<char*>(segments_[rank]->data()); }
  void* event(int rank, int stage) const { return segments_[rank]->event(stage); }

 private:
  SharedSegments() = default;

  std::vector<int> participants_;
  int rank_ = 0;
  int device_ = 0;
  int64_t bytes_ = 0;
  uint64_t barriers_ = 0;
  std::unique_ptr<SharedMemory> barrier_memory_;
  std::atomic<SharedBarrier*> barrier_{nullptr};  // null until it is mapped; another thread may break it before
  std::atomic<bool> joined_{false};
  std::vector<std::shared_ptr<Segment>> segments_;  // by rank
};

// A participant's segments are known by the number of an attempt until all have joined; then they serve calls.
void KeepAttempt(const std::vector<int>& participants, int number, int rank, std::shared_ptr<SharedSegments> segments);
std::shared_ptr<SharedSegments> FindAttempt(const std::vector<int>& participants, int number, int rank);
// Breaks segments that were not joined, so that participants that wait for them fail at once.
void ForgetAttempt(const std::vector<int>& participants, int number);
void KeepSegments(const std::vector<int>& participants, int rank, std::shared_ptr<SharedSegments> segments);
// The first segments that are large enough, or null: the same for all participants, which join in the same order.
std::shared_ptr<SharedSegments> FindSegments(const std::vector<int>& participants, int rank, int64_t bytes);
// Forgets the segments of all groups; calls that are running keep theirs.
void ForgetSegments();

}  // namespace te::collective_gemm
