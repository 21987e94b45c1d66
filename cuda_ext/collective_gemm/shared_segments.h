// Memory that the processes of one host share, for a group of devices that several of them drive: a segment on every
// device that its peers can access, and a record of every device by which they wait for each other. Made once for a
// group, and larger ones as calls need them.
//
// Peers find each other by texts. Nothing in a text is trusted: files are checked as shared_memory.h says, and segments
// of this process are looked up, not described.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collective_gemm/shared_memory.h"
#include "common/status.h"

namespace te::collective_gemm {

constexpr int kMaxParticipants = 64;

// A place names a device in all processes: the number of the process that drives it in the upper bits, and its number
// among the devices of that process in the lower 16.
inline int ProcessOf(int place) { return place >> 16; }
inline int NumberOf(int place) { return place & 0xffff; }

inline std::string NameOf(int place) {
  const std::string device = std::to_string(NumberOf(place));
  return ProcessOf(place) == 0 ? device : device + " of process " + std::to_string(ProcessOf(place));
}
inline std::string Names(const std::vector<int>& devices) {
  std::string text;
  for (const int device : devices) text += (text.empty() ? "" : ", ") + NameOf(device);
  return text;
}

// Seconds that a wait may take, thirty years: clocks count nanoseconds in 64 bits. False for NaN.
constexpr double kLongestTimeout = 1e9;
constexpr bool IsTimeout(double seconds) { return seconds >= 0 && seconds <= kLongestTimeout; }
inline std::chrono::nanoseconds Timeout(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

// Sets XLA's ordinals of this process's devices, by place.
void SetOrdinals(const std::map<int, int>& ordinals);
// The ordinal of a place of this process, or -1.
int OrdinalOf(int place);
// The place of an ordinal, or -1.
int PlaceOf(int ordinal);

// What must be the same on all devices of a call. See protocol.h.
using Terms = std::array<int64_t, 7>;

// By what a participant lets its peers know that it has arrived at a barrier. Lies in memory that all processes map.
struct Record {
  // Two barriers in a row use different entries, because a participant may arrive at the next barrier while a peer
  // still reads the terms of this one. An entry is one cache line, so that terms cost no transfer of their own.
  struct alignas(64) Arrival {
    std::atomic<uint64_t> barrier;
    Terms terms;
  };
  Arrival arrivals[2];
  alignas(64) std::atomic<uint32_t> broken;
  static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(Arrival) == 64);
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
  // `locals` are those of this process, by rank, otherwise null.
  Status Join(const std::vector<std::string>& texts, const std::vector<std::shared_ptr<SharedSegments>>& locals,
              std::chrono::nanoseconds timeout);

  // Waits as Rendezvous::Join does; each participant brings terms. After a timeout, or where terms differ, participants
  // may have counted their barriers differently: every later one fails at once, with nobody absent.
  bool Barrier(const Terms& mine, std::chrono::nanoseconds timeout, std::vector<Terms>& all, std::vector<int>& absent);
  // Makes the barriers of all participants fail at once.
  void Break() { records_[rank_]->broken.store(1); }
  bool joined() const { return joined_; }

  int64_t bytes() const { return bytes_; }
  char* data(int rank) const { return static_cast<char*>(segments_[rank]->data()); }
  void* event(int rank, int stage) const { return segments_[rank]->event(stage); }

 private:
  SharedSegments() = default;

  Status OpenAll(const std::vector<std::string>& texts, const std::vector<std::shared_ptr<SharedSegments>>& locals);
  Status OpenPeer(size_t rank, const std::string& text);
  bool HasArrived(size_t rank, uint64_t barrier) const;
  bool IsBroken() const;
  std::vector<int> Dead(uint64_t barrier) const;

  std::vector<int> participants_;
  int rank_ = 0;
  int device_ = 0;
  int64_t bytes_ = 0;
  uint64_t barriers_ = 0;
  std::vector<std::shared_ptr<SharedMemory>> memories_;  // of records, by rank
  std::vector<Record*> records_;                         // in them, null until they are open
  std::map<int, size_t> watched_;                        // while joining: of each other process the rank of a device
  std::vector<int> dead_;                                // devices whose processes have ended
  std::atomic<bool> joining_{false}, joined_{false};
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
