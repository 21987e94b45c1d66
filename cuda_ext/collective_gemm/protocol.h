// Who waits for whom. Every device's own host thread runs this, on the queues of its device.
//
// Host threads meet twice. At the first meeting they exchange addresses, and marks that their arrays are ready; after
// it, every wait for a mark finds it already placed in its queue, so nothing ever waits for work that a host thread has
// not yet handed over. At the second they exchange marks that nobody's arrays are in use any longer; a device's main
// queue goes on after the marks of all its peers.
//
// Every product has a queue of its own, the first ones more urgent than the later ones: where one leaves
// multiprocessors idle at its end, the next one fills them, without delaying it.
//
// A platform provides `Call`, the queues and marks of one device for one call:
//
//   - void* Mark(Queue, void* mark = nullptr): a point in a queue that any device can wait for; a given mark, or a new
//     one.
//   - Status Wait(Queue, void* mark).
//   - Status Copy(Queue, void* to, const void* from, int64_t bytes).
//   - Status Multiply(Queue, const gemm::Problem&).
//   - Status Sum(Queue, const ReduceScatterProblem&, int parts).
//   - std::atomic<int>* Readers(): host threads that have still to wait for marks of this call, or null.
//   - void Settle(): returns once all that is in this call's queues is done, those of the main queue excepted.
//   - void WaitOnHost(void* mark).
//
// Where a step fails, on this device or on another, nothing may outlast the call, for XLA then frees what it works on:
// every device settles its own queues and waits on the host for the marks of its peers.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "collective_gemm/collective_gemm.h"
#include "common/rendezvous.h"

namespace te::collective_gemm {

struct Queue {
  enum Kind { kMain, kCopy, kProduct } kind;
  int step = 0;  // of a product
};
inline constexpr int64_t kSpaceAlignment = 256;
inline constexpr Queue kMain{Queue::kMain}, kCopy{Queue::kCopy};
inline constexpr Queue ProductQueue(int step) { return {Queue::kProduct, step}; }

// What a device brings to a meeting.
struct Brought {
  std::vector<void*> arrays;
  void* mark = nullptr;
  std::vector<void*> marks_by_rank;
  std::atomic<int>* readers = nullptr;
  bool failed = false;
};

inline std::string Names(const std::vector<int>& devices) {
  std::string text;
  for (const int device : devices) text += (text.empty() ? "" : ", ") + NameOf(device);
  return text;
}

// The meetings of one call. A device that has failed must come too, or the others would wait in vain; nobody comes to
// another meeting after that.
template <typename Call>
class Meetings {
 public:
  Meetings(Call& call, const Group& group) : call_(call), group_(group) {}
  Meetings(const Meetings&) = delete;
  Meetings& operator=(const Meetings&) = delete;
  ~Meetings() {
    if (stage_ < kStages) {
      call_.Settle();
      Brought failed;
      failed.failed = true;
      std::vector<Brought> all;
      if (group_.space != nullptr) {
        group_.space->Break();
      } else if (MeetHere(failed, stage_, all, absent_)) {
        Hold(all);
        WaitForAll(stage_, all);
      }
    }
    for (std::atomic<int>* const readers : held_) readers->fetch_sub(1);
  }

  Status Meet(Brought mine, std::vector<Brought>& all) {
    const int stage = stage_++;
    // Peers of other processes wait for marks that the group shares, and that no other call uses.
    mine.readers = group_.space == nullptr ? call_.Readers() : nullptr;
    if (mine.readers != nullptr) mine.readers->fetch_add(group_.size() - 1);
    const bool complete =
        group_.space != nullptr ? MeetInSpace(mine, stage, all, absent_) : MeetHere(mine, stage, all, absent_);
    if (!complete) {
      stage_ = kStages;
      if (mine.readers != nullptr) mine.readers->fetch_sub(group_.size() - 1);  // nobody has seen its marks
      call_.Settle();
      return Status::Failed(absent_.empty() ? WasBroken() : WaitedInVain());
    }
    Hold(all);
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (!all[rank].failed) continue;
      stage_ = kStages;
      WaitForAll(stage, all);
      return Status::Failed(Where() + " gave up because device " + NameOf(group_.devices[rank]) + " failed");
    }
    return Status::Ok();
  }

 private:
  static constexpr int kStages = 2;

  void Hold(const std::vector<Brought>& all) {
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (rank != group_.rank && all[rank].readers != nullptr) held_.push_back(all[rank].readers);
    }
  }

  void WaitForAll(int stage, const std::vector<Brought>& all) {
    call_.Settle();
    for (int rank = 0; stage == 1 && rank < group_.size(); ++rank) {
      if (rank != group_.rank && all[rank].mark != nullptr) call_.WaitOnHost(all[rank].mark);
    }
  }

  bool MeetHere(const Brought& mine, int stage, std::vector<Brought>& all, std::vector<int>& absent) {
    static auto* rendezvous = new Rendezvous<Brought>;
    return rendezvous->Meet(MeetingKey{group_.run, group_.call, stage, group_.devices}, group_.rank, mine,
                            group_.timeout, all, absent);
  }

  // Processes bring nothing but themselves: arrays lie at the same places of every device's memory, and each device has
  // one mark for each stage.
  bool MeetInSpace(const Brought& mine, int stage, std::vector<Brought>& all, std::vector<int>& absent) {
    const Space& space = *group_.space;
    if (!group_.space->Meet(group_.timeout, absent)) return false;
    all.assign(group_.size(), {});
    for (int rank = 0; rank < group_.size(); ++rank) {
      for (void* const array : mine.arrays) {
        all[rank].arrays.push_back(space.data(rank) + (static_cast<char*>(array) - space.data(group_.rank)));
      }
      all[rank].mark = space.mark(rank, stage);
    }
    return true;
  }

  std::string Where() const {
    return group_.name + ", call " + std::to_string(group_.call) + ", on device " +
           NameOf(group_.devices[group_.rank]) + " of the group " + Names(group_.devices);
  }

  std::string WaitedInVain() const {
    return Where() + " waited " + std::to_string(std::chrono::duration<double>(group_.timeout).count()) +
           " s for device " + Names(absent_) +
           ", which did not come: look for what failed there first, or give the call a longer timeout";
  }

  std::string WasBroken() const {
    return Where() +
           " cannot run: another call of this group failed, and after that its processes do not agree on what "
           "they share: look for the first error, and start them anew";
  }

  Call& call_;
  const Group& group_;
  int stage_ = 0;
  std::vector<std::atomic<int>*> held_;  // of peers, whose marks this thread waits for until it leaves
  std::vector<int> absent_;
};

// Returns from the caller where a step fails.
#define TE_JAX_TRY(step)                                        \
  do {                                                          \
    if (Status status_ = (step); !status_.ok()) return status_; \
  } while (false)

// A device's share of a workspace that is divided among the steps of a call.
inline void* WorkspaceOf(const gemm::Problem& problem, void* workspace, int step) {
  return workspace == nullptr ? nullptr : static_cast<char*>(workspace) + step * problem.workspace_bytes;
}

// The mark that goes to a meeting.
template <typename Call>
void* PublicMark(Call& call, const Group& group, Queue queue, int stage) {
  return group.space == nullptr ? call.Mark(queue) : call.Mark(queue, group.space->mark(group.rank, stage));
}

inline Status SpaceTooSmall(const Group& group) {
  return Status::Failed(group.name +
                        " needs more memory than the group shares: " + std::to_string(group.space->bytes()) + " bytes");
}

// The first meeting.
template <typename Call>
Status Introduce(Meetings<Call>& meetings, std::vector<void*> arrays, void* ready, std::vector<Brought>& all) {
  Brought mine;
  mine.arrays = std::move(arrays);
  mine.mark = ready;
  return meetings.Meet(std::move(mine), all);
}

// The second meeting, after all waits for marks of the first one are in this device's queues.
template <typename Call>
Status Conclude(Meetings<Call>& meetings, void* mark, std::vector<void*> marks_by_rank, std::vector<Brought>& second) {
  Brought mine;
  mine.mark = mark;
  mine.marks_by_rank = std::move(marks_by_rank);
  return meetings.Meet(std::move(mine), second);
}

// The main queue goes on after its peers' marks.
template <typename Call>
Status Leave(Call& call, const Group& group, const std::vector<Brought>& second) {
  for (int step = 1; step < group.size(); ++step) {
    TE_JAX_TRY(call.Wait(kMain, second[(group.rank + step) % group.size()].mark));
  }
  return Status::Ok();
}

inline std::vector<Gathered> AllOf(const AllGatherProblem& p) {
  std::vector<Gathered> all{p.x};
  if (p.scales.bytes != 0) all.push_back(p.scales);
  all.insert(all.end(), p.others.begin(), p.others.end());
  return all;
}

// A part of x times every weight.
template <typename Call>
Status MultiplyPart(Call& call, const Group& group, const AllGatherProblem& p, int rank, int step) {
  for (const Product& product : p.products) {
    gemm::Problem problem = product.problem;
    const int64_t bytes = problem.m * problem.n * gemm::SizeOf(problem.d_type);
    problem.workspace = WorkspaceOf(problem, p.workspace, step);
    for (int64_t piece = 0; piece < p.x.pieces; ++piece) {
      problem.a.data = p.x.Part(rank, group, piece);
      if (p.scales.bytes != 0) {
        const int64_t of_piece = p.scales.bytes / p.x.pieces;
        problem.a.scales = reinterpret_cast<const float*>(p.scales.Part(rank, group, 0) + piece * of_piece);
      }
      problem.d = static_cast<char*>(product.y) + (piece * group.size() + rank) * bytes;
      TE_JAX_TRY(call.Multiply(ProductQueue(step), problem));
    }
  }
  return Status::Ok();
}

// The main queue goes on after all products.
template <typename Call>
Status JoinProducts(Call& call, int steps) {
  for (int step = 0; step < steps; ++step) TE_JAX_TRY(call.Wait(kMain, call.Mark(ProductQueue(step))));
  return Status::Ok();
}

// A device's part of some arrays, from or to one of them.
template <typename Call>
Status CopyParts(Call& call, const Group& group, const std::vector<Gathered>& arrays, const Brought& peer, int rank,
                 bool put, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) {
    Gathered array = arrays[i];
    const char* const theirs = static_cast<const char*>(peer.arrays[i]);
    if (put) array.all = peer.arrays[i];
    for (int64_t piece = 0; piece < array.pieces; ++piece) {
      const char* const from = put ? array.Part(group.rank, group, piece) : theirs + piece * array.bytes;
      TE_JAX_TRY(call.Copy(kCopy, array.At(put ? group.rank : rank, group, piece), from, array.bytes));
    }
  }
  return Status::Ok();
}

// Get: every device reads its peers' parts, its next neighbour's first, so that no two read from the same one at the
// same time. Put: every device writes its part to its peers, its former neighbour first, who wait for marks that come
// to the second meeting. What products need comes before what is only gathered.
template <typename Call>
Status RunAllGather(Call& call, const Group& group, const AllGatherProblem& p) {
  const int size = group.size(), rank = group.rank;
  const std::vector<Gathered> arrays = AllOf(p);
  const size_t urgent = p.scales.bytes != 0 ? 2 : 1;
  Meetings meetings(call, group);
  std::vector<void*> addresses;
  for (const Gathered& array : arrays) addresses.push_back(p.put ? array.all : const_cast<void*>(array.mine));
  if (group.space != nullptr) {  // what XLA has allocated other processes cannot reach
    char* next = group.space->data(rank);
    for (size_t i = 0; i < arrays.size(); ++i) {
      const int64_t bytes = arrays[i].pieces * arrays[i].bytes;
      if (next + bytes > group.space->data(rank) + group.space->bytes()) return SpaceTooSmall(group);
      TE_JAX_TRY(call.Copy(kMain, next, arrays[i].mine, bytes));
      addresses[i] = next;
      next += (bytes + kSpaceAlignment - 1) / kSpaceAlignment * kSpaceAlignment;
    }
  }
  void* const ready = PublicMark(call, group, kMain, 0);
  std::vector<Brought> peers;
  TE_JAX_TRY(Introduce(meetings, addresses, ready, peers));
  TE_JAX_TRY(call.Wait(kCopy, ready));
  for (int step = 0; step < size; ++step) TE_JAX_TRY(call.Wait(ProductQueue(step), ready));
  if (!p.put) TE_JAX_TRY(MultiplyPart(call, group, p, rank, 0));

  auto peer_at = [&](int step) { return (rank + (p.put ? size - step : step)) % size; };
  std::vector<void*> copied(size);  // marks after what is urgent, by rank of the peer
  for (int step = 1; step < size; ++step) {
    const int peer = peer_at(step);
    TE_JAX_TRY(call.Wait(kCopy, peers[peer].mark));
    TE_JAX_TRY(CopyParts(call, group, arrays, peers[peer], peer, p.put, 0, urgent));
    copied[peer] = call.Mark(kCopy);
  }
  for (int step = 1; step < size; ++step) {
    const int peer = peer_at(step);
    TE_JAX_TRY(CopyParts(call, group, arrays, peers[peer], peer, p.put, urgent, arrays.size()));
  }
  void* const done = PublicMark(call, group, kCopy, 1);  // with its peers' arrays
  for (const Gathered& array : arrays) {
    for (int64_t piece = 0; array.with_mine && piece < array.pieces; ++piece) {
      TE_JAX_TRY(call.Copy(kCopy, array.At(rank, group, piece), array.Part(rank, group, piece), array.bytes));
    }
  }
  TE_JAX_TRY(call.Wait(kMain, call.Mark(kCopy)));
  if (!p.put) {
    for (int step = 1; step < size; ++step) {
      const int peer = peer_at(step);
      TE_JAX_TRY(call.Wait(ProductQueue(step), copied[peer]));
      TE_JAX_TRY(MultiplyPart(call, group, p, peer, step));
    }
    TE_JAX_TRY(JoinProducts(call, size));
  }
  std::vector<Brought> senders;
  TE_JAX_TRY(Conclude(meetings, done, copied, senders));
  if (p.put) {
    TE_JAX_TRY(MultiplyPart(call, group, p, rank, 0));
    for (int step = 1; step < size; ++step) {
      const int sender = (rank + step) % size;  // who sends to this device in the same order
      TE_JAX_TRY(call.Wait(ProductQueue(step), senders[sender].marks_by_rank[rank]));
      TE_JAX_TRY(MultiplyPart(call, group, p, sender, step));
    }
    TE_JAX_TRY(JoinProducts(call, size));
  }
  return Leave(call, group, senders);
}

// Every device multiplies the rows of its next neighbour first and its own last, so that nothing is left to send at the
// end, and sends each product to its owner, who adds up all of them once, in float32.
template <typename Call>
Status RunReduceScatter(Call& call, const Group& group, ReduceScatterProblem p) {
  const int size = group.size(), rank = group.rank;
  Meetings meetings(call, group);
  if (group.space != nullptr) {
    const gemm::Problem& product = p.products.front();
    if (size * p.pieces * product.m * product.n * gemm::SizeOf(product.d_type) > group.space->bytes()) {
      return SpaceTooSmall(group);
    }
    p.received = group.space->data(rank);
  }
  void* const ready = PublicMark(call, group, kMain, 0);
  std::vector<Brought> peers;
  TE_JAX_TRY(Introduce(meetings, {p.received}, ready, peers));

  const gemm::Problem& first = p.products.front();
  const int64_t bytes = first.m * first.n * gemm::SizeOf(first.d_type);
  void* begun = ready;
  for (int step = 0; step < size; ++step) {
    const int owner = (rank + step + 1) % size;
    const Queue queue = ProductQueue(step);
    // Whatever starts first takes the whole device: nothing may overtake what has to be sent.
    TE_JAX_TRY(call.Wait(queue, begun));
    char* const received =
        static_cast<char*>(owner == rank ? p.received : peers[owner].arrays[0]) + rank * p.pieces * bytes;
    const bool copied = owner != rank && p.outgoing != nullptr;
    char* const to = copied ? static_cast<char*>(p.outgoing) + step * p.pieces * bytes : received;
    if (owner != rank && !copied) TE_JAX_TRY(call.Wait(queue, peers[owner].mark));
    begun = call.Mark(queue);
    for (int64_t piece = 0; piece < p.pieces; ++piece) {
      for (size_t i = 0; i < p.products.size(); ++i) {
        gemm::Problem problem = p.products[i];
        const int64_t part = piece * size + owner;
        problem.workspace = WorkspaceOf(problem, p.workspace, step);
        problem.a.data =
            static_cast<const char*>(problem.a.data) + part * problem.m * problem.k * gemm::SizeOf(problem.a.type);
        if (problem.a.scales != nullptr) problem.a.scales += part * p.scales_of_piece[i];
        problem.d = to + piece * bytes;
        problem.accumulator = i == 0 ? nullptr : problem.d;
        TE_JAX_TRY(call.Multiply(queue, problem));
      }
    }
    if (copied) {
      TE_JAX_TRY(call.Wait(kCopy, call.Mark(queue)));
      TE_JAX_TRY(call.Wait(kCopy, peers[owner].mark));
      TE_JAX_TRY(call.Copy(kCopy, received, to, p.pieces * bytes));
    }
  }
  // Before this mark, all that this device sends has arrived.
  if (p.outgoing == nullptr) {
    for (int step = 0; step < size - 1; ++step) TE_JAX_TRY(call.Wait(kCopy, call.Mark(ProductQueue(step))));
  }
  void* const sent = PublicMark(call, group, kCopy, 1);
  TE_JAX_TRY(call.Wait(kMain, sent));
  TE_JAX_TRY(JoinProducts(call, size));
  std::vector<Brought> senders;
  TE_JAX_TRY(Conclude(meetings, sent, {}, senders));
  TE_JAX_TRY(Leave(call, group, senders));
  return call.Sum(kMain, p, size);
}

}  // namespace te::collective_gemm
