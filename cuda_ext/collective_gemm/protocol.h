// Who waits for whom. Every device's own host thread runs this, on the queues of its device.
//
// Host threads meet twice. At the first meeting they exchange addresses, and marks that their arrays are ready; after
// it, every wait for a mark finds it already placed in its queue, so nothing ever waits for work that a host thread has
// not yet handed over. At the second they exchange marks that nobody's arrays are in use any longer; a device's main
// queue goes on after the marks of all its peers.
//
// Products of a gather take turns on the main queue and one beside it: where one leaves multiprocessors idle at its
// end, the next one fills them. Those of a scatter must keep their order, on one queue: which of two products that are
// let loose together comes first is a matter of chance. What needs no peer is handed over before the first meeting.
// Queues, marks and waits are few, because calls of the driver are what a short call spends its time on.
//
// A platform provides `Call`, the queues and marks of one device for one call:
//
//   - Status Begin(): takes them, before all that follows. Where it fails only Settle and WaitOnHost are called.
//   - Status Mark(Queue, void*& mark): a point in a queue that any device can wait for; a given mark, or a new one.
//   - Status Wait(Queue, void* mark).
//   - Status Copy(Queue, void* to, const void* from, int64_t bytes).
//   - Status Multiply(Queue, const gemm::Problem&).
//   - Status Sum(Queue, const ReduceScatterProblem&, const Summands&).
//   - std::atomic<int>* Readers(): host threads that have still to wait for marks of this call, or null.
//   - void Settle(): returns once all that is in the queues is done.
//   - void WaitOnHost(void* mark).
//
// Where a step fails, on this device or on another, nothing may outlast the call, for XLA then frees what it works on:
// every device settles its own queues and waits on the host for the marks of its peers.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "collective_gemm/collective_gemm.h"
#include "common/rendezvous.h"

namespace te::collective_gemm {

enum class Queue { kMain, kSide, kCopy };
inline constexpr int64_t kSpaceAlignment = 256;
inline constexpr Queue ProductQueue(int turn) { return turn % kProductQueues == 0 ? Queue::kMain : Queue::kSide; }

// What a device brings to a meeting.
struct Brought {
  std::vector<void*> arrays;
  void* mark = nullptr;
  std::vector<void*> marks_by_rank;
  std::atomic<int>* readers = nullptr;
  bool failed = false;

  void* MarkFor(int rank) const { return marks_by_rank.empty() ? nullptr : marks_by_rank[rank]; }
};

inline std::string Names(const std::vector<int>& devices) {
  std::string text;
  for (const int device : devices) text += (text.empty() ? "" : ", ") + NameOf(device);
  return text;
}

// The meetings of one call. A device that has failed must come too, or the others would wait in vain; nobody comes to
// another meeting after that. Where a call leaves without having said that it is done, it has failed.
template <typename Call>
class Meetings {
 public:
  Meetings(Call& call, const Group& group) : call_(call), group_(group) {}
  Meetings(const Meetings&) = delete;
  Meetings& operator=(const Meetings&) = delete;
  ~Meetings() {
    if (!done_) {
      call_.Settle();
      if (stage_ < kStages) ComeWithNothing();
      WaitForPeers();
    }
    for (std::atomic<int>* const readers : held_) readers->fetch_sub(1);
  }

  // What a device has brought, once all have met.
  const Brought& Introduced(int rank) const { return met_[0][rank]; }
  const Brought& Concluded(int rank) const { return met_[1][rank]; }

  // All that this device waits for is in its queues.
  Status Done() {
    done_ = true;
    return Status::Ok();
  }

  // The first meeting.
  Status Introduce(std::vector<void*> arrays, void* ready) {
    Brought mine;
    mine.arrays = std::move(arrays);
    mine.mark = ready;
    return Meet(std::move(mine));
  }

  // The second meeting, after all waits for marks of the first one are in this device's queues.
  Status Conclude(void* mark, std::vector<void*> marks_by_rank) {
    Brought mine;
    mine.mark = mark;
    mine.marks_by_rank = std::move(marks_by_rank);
    return Meet(std::move(mine));
  }

 private:
  static constexpr int kStages = 2;

  Status Meet(Brought mine) {
    const int stage = stage_++;
    std::vector<Brought>& all = met_[stage];
    // Peers of other processes wait for marks that the group shares, and that no other call uses.
    mine.readers = group_.space == nullptr ? call_.Readers() : nullptr;
    if (mine.readers != nullptr) mine.readers->fetch_add(group_.size() - 1);
    const bool complete =
        group_.space != nullptr ? MeetInSpace(mine, stage, all, absent_) : MeetHere(mine, stage, all, absent_);
    if (!complete) {
      stage_ = kStages;
      if (mine.readers != nullptr) mine.readers->fetch_sub(group_.size() - 1);  // nobody has seen its marks
      return Status::Failed(absent_.empty() ? WasBroken() : WaitedInVain());
    }
    Hold(all);
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (!all[rank].failed) continue;
      stage_ = kStages;
      return Status::Failed(Where() + " gave up because device " + NameOf(group_.devices[rank]) + " failed");
    }
    return Status::Ok();
  }

  void Hold(const std::vector<Brought>& all) {
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (rank != group_.rank && all[rank].readers != nullptr) held_.push_back(all[rank].readers);
    }
  }

  void ComeWithNothing() {
    if (group_.space != nullptr) return group_.space->Break();
    Brought failed;
    failed.failed = true;
    if (MeetHere(failed, stage_, met_[stage_], absent_)) Hold(met_[stage_]);
  }

  // Nobody uses this device's arrays any longer.
  void WaitForPeers() {
    for (const Brought& peer : met_[kStages - 1]) {
      for (void* const mark : {peer.mark, peer.MarkFor(group_.rank)}) {
        if (mark != nullptr) call_.WaitOnHost(mark);
      }
    }
  }

  // Who has come to the first meeting comes to the second, if with nothing, and writes to this device's arrays until
  // then: there is no limit to waiting for it.
  bool MeetHere(const Brought& mine, int stage, std::vector<Brought>& all, std::vector<int>& absent) {
    static auto* rendezvous = new Rendezvous<Brought>;
    return rendezvous->Meet(MeetingKey{group_.run, group_.call, stage, group_.devices}, group_.rank, mine,
                            stage == 0 ? std::optional(group_.timeout) : std::nullopt, all, absent);
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
  bool done_ = false;
  std::vector<Brought> met_[kStages];    // by rank
  std::vector<std::atomic<int>*> held_;  // of peers, whose marks this thread waits for until it leaves
  std::vector<int> absent_;
};

// Returns from the caller where a step fails.
#define TE_JAX_TRY(step)                                        \
  do {                                                          \
    if (Status status_ = (step); !status_.ok()) return status_; \
  } while (false)

// The share of a workspace that belongs to the queue of a product.
inline void* WorkspaceOf(const gemm::Problem& problem, void* workspace, int turn) {
  return workspace == nullptr ? nullptr
                              : static_cast<char*>(workspace) + turn % kProductQueues * problem.workspace_bytes;
}

// The mark that goes to a meeting.
template <typename Call>
Status PublicMark(Call& call, const Group& group, Queue queue, int stage, void*& mark) {
  mark = group.space == nullptr ? nullptr : group.space->mark(group.rank, stage);
  return call.Mark(queue, mark);
}

// What follows in a queue waits for what is in another one.
template <typename Call>
Status Await(Call& call, Queue queue, Queue other) {
  void* mark = nullptr;
  TE_JAX_TRY(call.Mark(other, mark));
  return call.Wait(queue, mark);
}

inline Status SpaceTooSmall(const Group& group) {
  return Status::Failed(group.name +
                        " needs more memory than the group shares: " + std::to_string(group.space->bytes()) + " bytes");
}

inline std::vector<Gathered> AllOf(const AllGatherProblem& p) {
  std::vector<Gathered> all{p.x};
  if (p.scales.bytes != 0) all.push_back(p.scales);
  all.insert(all.end(), p.others.begin(), p.others.end());
  return all;
}

// A part of x times a weight: what is gathered has the other devices' rows between pieces.
inline gemm::Problem ProductOfPart(const Group& group, const AllGatherProblem& p, const Product& product, int rank,
                                   int turn) {
  gemm::Problem problem = product.problem;
  const int64_t x_count = problem.m * problem.k, y_count = problem.m * problem.n;
  problem.workspace = WorkspaceOf(problem, p.workspace, turn);
  problem.a.data = p.x.Part(rank, group, 0);
  problem.d = static_cast<char*>(product.y) + rank * y_count * gemm::SizeOf(problem.d_type);
  problem.batch.count = p.x.pieces;
  problem.batch.a_stride = rank == group.rank ? x_count : group.size() * x_count;
  problem.batch.d_stride = group.size() * y_count;
  if (p.scales.bytes != 0) {
    problem.a.scales = reinterpret_cast<const float*>(p.scales.Part(rank, group, 0));
    problem.batch.a_scales_stride = p.scales.bytes / p.x.pieces / static_cast<int64_t>(sizeof(float));
  }
  return problem;
}

// A part of x times every weight.
template <typename Call>
Status MultiplyPart(Call& call, const Group& group, const AllGatherProblem& p, int rank, int turn) {
  for (const Product& product : p.products) {
    TE_JAX_TRY(call.Multiply(ProductQueue(turn), ProductOfPart(group, p, product, rank, turn)));
  }
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
      TE_JAX_TRY(call.Copy(Queue::kCopy, array.At(put ? group.rank : rank, group, piece), from, array.bytes));
    }
  }
  return Status::Ok();
}

// What XLA has allocated other processes cannot reach.
template <typename Call>
Status CopyIntoSpace(Call& call, const Group& group, const std::vector<Gathered>& arrays,
                     std::vector<void*>& addresses) {
  char* const begin = group.space->data(group.rank);
  char* next = begin;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const int64_t bytes = arrays[i].pieces * arrays[i].bytes;
    if (next + bytes > begin + group.space->bytes()) return SpaceTooSmall(group);
    TE_JAX_TRY(call.Copy(Queue::kMain, next, arrays[i].mine, bytes));
    addresses[i] = next;
    next += (bytes + kSpaceAlignment - 1) / kSpaceAlignment * kSpaceAlignment;
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
  TE_JAX_TRY(call.Begin());
  std::vector<void*> addresses;
  for (const Gathered& array : arrays) addresses.push_back(p.put ? array.all : const_cast<void*>(array.mine));
  if (group.space != nullptr) TE_JAX_TRY(CopyIntoSpace(call, group, arrays, addresses));
  void* ready = nullptr;
  TE_JAX_TRY(PublicMark(call, group, Queue::kMain, 0, ready));
  TE_JAX_TRY(MultiplyPart(call, group, p, rank, 0));
  TE_JAX_TRY(meetings.Introduce(std::move(addresses), ready));

  TE_JAX_TRY(call.Wait(Queue::kCopy, ready));
  auto peer_at = [&](int step) { return (rank + (p.put ? size - step : step)) % size; };
  std::vector<void*> copied(size);  // marks after what is urgent, by rank of the peer
  void* last = ready;
  for (int step = 1; step < size; ++step) {
    const int peer = peer_at(step);
    TE_JAX_TRY(call.Wait(Queue::kCopy, meetings.Introduced(peer).mark));
    TE_JAX_TRY(CopyParts(call, group, arrays, meetings.Introduced(peer), peer, p.put, 0, urgent));
    TE_JAX_TRY(call.Mark(Queue::kCopy, copied[peer]));
    last = copied[peer];
  }
  const bool more = arrays.size() > urgent;
  for (int step = 1; more && step < size; ++step) {
    const int peer = peer_at(step);
    TE_JAX_TRY(CopyParts(call, group, arrays, meetings.Introduced(peer), peer, p.put, urgent, arrays.size()));
  }
  // With its peers' arrays; who is only put to, and of what is urgent, waits for the marks above.
  const bool marks_done = !p.put || more;
  void* done = nullptr;
  if (marks_done) {
    TE_JAX_TRY(PublicMark(call, group, Queue::kCopy, 1, done));
    last = done;
  }
  for (const Gathered& array : arrays) {
    if (!array.with_mine) continue;
    for (int64_t piece = 0; piece < array.pieces; ++piece) {
      TE_JAX_TRY(call.Copy(Queue::kCopy, array.At(rank, group, piece), array.Part(rank, group, piece), array.bytes));
    }
    last = nullptr;
    TE_JAX_TRY(call.Mark(Queue::kCopy, last));
  }
  auto multiply_others = [&] {
    for (int step = 1; step < size; ++step) {
      const int peer = (rank + step) % size;  // those who send to this device do so in the same order
      TE_JAX_TRY(call.Wait(ProductQueue(step), p.put ? meetings.Concluded(peer).MarkFor(rank) : copied[peer]));
      TE_JAX_TRY(MultiplyPart(call, group, p, peer, step));
    }
    return Status::Ok();
  };
  if (!p.put) TE_JAX_TRY(multiply_others());
  TE_JAX_TRY(meetings.Conclude(done, copied));
  if (p.put) TE_JAX_TRY(multiply_others());

  if (size > 1) TE_JAX_TRY(Await(call, Queue::kMain, Queue::kSide));
  TE_JAX_TRY(call.Wait(Queue::kMain, last));
  for (int step = 1; marks_done && step < size; ++step) {
    TE_JAX_TRY(call.Wait(Queue::kMain, meetings.Concluded((rank + step) % size).mark));
  }
  return meetings.Done();
}

// The rows of one device times a weight, added to those times the ones before it, or to `added`.
inline gemm::Problem ProductOfRows(const Group& group, const ReduceScatterProblem& p, size_t weight, int owner,
                                   void* to, const void* added) {
  gemm::Problem problem = p.products[weight];
  const int64_t x_count = problem.m * problem.k, scales = p.scales_of_piece[weight];
  problem.workspace = p.workspace;
  problem.a.data = static_cast<const char*>(problem.a.data) + owner * x_count * gemm::SizeOf(problem.a.type);
  if (problem.a.scales != nullptr) problem.a.scales += owner * scales;
  problem.d = to;
  problem.accumulator = weight != 0 ? to : added;
  problem.batch.count = p.pieces;
  problem.batch.a_stride = group.size() * x_count;
  problem.batch.a_scales_stride = group.size() * scales;
  problem.batch.d_stride = problem.m * problem.n;
  return problem;
}

// The rows of one device times every weight.
template <typename Call>
Status MultiplyRows(Call& call, const Group& group, const ReduceScatterProblem& p, int owner, char* to,
                    const char* added) {
  for (size_t i = 0; i < p.products.size(); ++i) {
    TE_JAX_TRY(call.Multiply(Queue::kMain, ProductOfRows(group, p, i, owner, to, added)));
  }
  return Status::Ok();
}

// Every device multiplies the rows of its next neighbour first and its own last, so that nothing is left to send at the
// end, and in just that order, so that no two send to the same one at the same time. All parts are added up once, in
// float32; of two devices the last product does that itself. The products of several weights are added up in float32
// before that, and rounded while the next ones run.
template <typename Call>
Status RunReduceScatter(Call& call, const Group& group, ReduceScatterProblem p) {
  const int size = group.size(), rank = group.rank, former = (rank + size - 1) % size;
  const int64_t bytes = p.BytesOfPart();
  Meetings meetings(call, group);
  TE_JAX_TRY(call.Begin());
  if (group.space != nullptr) {
    if (p.Parts(size) * bytes > group.space->bytes()) return SpaceTooSmall(group);
    p.received = group.space->data(rank);
  }
  void* ready = nullptr;
  TE_JAX_TRY(PublicMark(call, group, Queue::kMain, 0, ready));
  TE_JAX_TRY(meetings.Introduce({p.received}, ready));

  std::vector<void*> sent(size);  // by owner
  void* rounded[2] = {};          // of sums that may then be written over
  const auto add_up = [&](int step, int owner) {
    if (step >= 2) TE_JAX_TRY(call.Wait(Queue::kMain, rounded[step % 2]));
    return MultiplyRows(call, group, p, owner, reinterpret_cast<char*>(p.SumsOf(step)), nullptr);
  };
  for (int step = 0; step < size - 1; ++step) {
    const int owner = (rank + step + 1) % size;
    const Brought& peer = meetings.Introduced(owner);
    char* const received = static_cast<char*>(peer.arrays[0]) + PartFrom(rank, owner, size) * bytes;
    if (p.outgoing == nullptr) {
      TE_JAX_TRY(call.Wait(Queue::kMain, peer.mark));
      TE_JAX_TRY(MultiplyRows(call, group, p, owner, received, nullptr));
      TE_JAX_TRY(call.Mark(Queue::kMain, sent[owner]));
      continue;
    }
    char* const outgoing = static_cast<char*>(p.outgoing) + step * bytes;
    TE_JAX_TRY(p.sums != nullptr ? add_up(step, owner) : MultiplyRows(call, group, p, owner, outgoing, nullptr));
    TE_JAX_TRY(Await(call, Queue::kCopy, Queue::kMain));
    if (p.sums != nullptr) {
      TE_JAX_TRY(call.Sum(Queue::kCopy, p, {nullptr, 0, p.SumsOf(step), nullptr, outgoing}));
      rounded[step % 2] = nullptr;
      if (step + 2 < size) TE_JAX_TRY(call.Mark(Queue::kCopy, rounded[step % 2]));
    }
    TE_JAX_TRY(call.Wait(Queue::kCopy, peer.mark));
    TE_JAX_TRY(call.Copy(Queue::kCopy, received, outgoing, bytes));
    TE_JAX_TRY(call.Mark(Queue::kCopy, sent[owner]));
  }
  void* all_sent = nullptr;  // where each device has but one mark
  if (group.space != nullptr) {
    TE_JAX_TRY(PublicMark(call, group, p.outgoing == nullptr ? Queue::kMain : Queue::kCopy, 1, all_sent));
  }
  TE_JAX_TRY(meetings.Conclude(all_sent, sent));

  auto wait_for = [&](int sender) {
    const Brought& peer = meetings.Concluded(sender);
    return call.Wait(Queue::kMain, group.space != nullptr ? peer.mark : peer.MarkFor(rank));
  };
  if (p.LastProductAdds(size)) {
    if (size > 1) TE_JAX_TRY(wait_for(former));
    const char* const added = size > 1 ? static_cast<const char*>(p.received) : nullptr;
    TE_JAX_TRY(MultiplyRows(call, group, p, rank, static_cast<char*>(p.z), added));
  } else {
    char* const own = static_cast<char*>(p.received) + PartFrom(rank, rank, size) * bytes;
    TE_JAX_TRY(p.sums != nullptr ? add_up(size - 1, rank) : MultiplyRows(call, group, p, rank, own, nullptr));
    for (int step = 1; step < size; ++step) TE_JAX_TRY(wait_for((rank + step) % size));
    const float* const sums = p.sums != nullptr ? p.SumsOf(size - 1) : nullptr;
    TE_JAX_TRY(call.Sum(Queue::kMain, p, {p.received, p.Parts(size), sums, p.bias, p.z}));
  }
  if (size > 1) TE_JAX_TRY(call.Wait(Queue::kMain, sent[former]));  // the last that this device sends
  return meetings.Done();
}

}  // namespace te::collective_gemm
