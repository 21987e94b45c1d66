// The protocol of collective GEMMs: in which order devices copy, multiply and wait. The host thread of every device
// runs it on the streams of its device.
//
// Host threads have two rendezvous (call_rendezvous.h). At the first one they exchange addresses, and events after
// which their arrays are ready. Every event is recorded before a peer waits for it, so no device ever waits for work
// that a host thread has not enqueued. At the second one they exchange events after which their peers' arrays are no
// longer in use; a device's main stream goes on after the events of all its peers.
//
// GEMMs of a gather take turns on the main stream and a side stream: where one leaves multiprocessors idle at its end,
// the next one fills them. GEMMs of a scatter stay in order, on one stream: two that become ready together could run in
// either order. Work that needs no peer is enqueued before the first rendezvous. Streams, events and waits are few,
// because a short call spends its time on calls of the driver.
//
// A platform provides `Call`, the streams and events of one device for one call:
//
//   - static constexpr bool kOneByOne: whether a device makes the calls of an execution one after another.
//   - Status Begin(): acquires them, before all else. After a failure only Synchronize and SynchronizeEvent are called.
//   - Status Record(Stream, void*& event): a point in a stream, in the given event or in a new one.
//   - Status Wait(Stream, void* event): holds a stream until the event, which any device may have recorded.
//   - Status Copy(Stream, void* to, const void* from, int64_t bytes).
//   - Status Multiply(Stream, const gemm::Problem&).
//   - Status Sum(Stream, const ReduceScatterProblem&, const Summands&).
//   - std::atomic<int>* Readers(): how many host threads have still to wait for events of this call; null if none do.
//   - void Synchronize(): blocks the host until the streams are done.
//   - void SynchronizeEvent(void* event): blocks the host until the event.
//
// Where a step fails, on this device or on another, no work may outlast the call, because XLA then frees the arrays:
// every device synchronizes its own streams, and with the events of its peers.
#pragma once

#include <vector>

#include "collective_gemm/call_rendezvous.h"
#include "collective_gemm/collective_gemm.h"

namespace te::collective_gemm {

enum class Stream { kMain, kSide, kCopy };
inline constexpr int64_t kSegmentAlignment = 256;
inline constexpr Stream GemmStream(int turn) { return turn % kGemmStreams == 0 ? Stream::kMain : Stream::kSide; }

// The part of a workspace that belongs to the stream of a GEMM.
inline void* WorkspaceOf(const gemm::Problem& problem, void* workspace, int turn) {
  return workspace == nullptr ? nullptr : static_cast<char*>(workspace) + turn % kGemmStreams * problem.workspace_bytes;
}

// Records the event of a rendezvous.
template <typename Call>
Status RecordForPeers(Call& call, const Group& group, Stream stream, int stage, void*& event) {
  event = group.segments == nullptr ? nullptr : group.segments->event(group.rank, stage);
  return call.Record(stream, event);
}

// Holds a stream until the work that is in another one by now.
template <typename Call>
Status WaitForStream(Call& call, Stream stream, Stream other) {
  void* event = nullptr;
  TE_JAX_TRY(call.Record(other, event));
  return call.Wait(stream, event);
}

inline Status SegmentTooSmall(const Group& group) {
  return Status::Failed(
      group.name + " needs more memory than the group shares: " + std::to_string(group.segments->bytes()) + " bytes");
}

inline std::vector<Gathered> AllOf(const AllGatherProblem& p) {
  std::vector<Gathered> all{p.x};
  if (p.scales.bytes != 0) all.push_back(p.scales);
  all.insert(all.end(), p.others.begin(), p.others.end());
  return all;
}

// The GEMM of one device's part of x with a weight. In the gathered x its pieces lie between those of other devices.
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

// The GEMMs of one device's part of x with all weights.
template <typename Call>
Status MultiplyPart(Call& call, const Group& group, const AllGatherProblem& p, int rank, int turn) {
  for (const Product& product : p.products) {
    TE_JAX_TRY(call.Multiply(GemmStream(turn), ProductOfPart(group, p, product, rank, turn)));
  }
  return Status::Ok();
}

// Gets a peer's part of some arrays, or puts this device's part to it.
template <typename Call>
Status CopyParts(Call& call, const Group& group, const std::vector<Gathered>& arrays, const Contribution& peer,
                 int rank, bool put, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) {
    Gathered array = arrays[i];
    const char* const theirs = static_cast<const char*>(peer.arrays[i]);
    if (put) array.all = peer.arrays[i];
    for (int64_t piece = 0; piece < array.pieces; ++piece) {
      const char* const from = put ? array.Part(group.rank, group, piece) : theirs + piece * array.bytes;
      TE_JAX_TRY(call.Copy(Stream::kCopy, array.At(put ? group.rank : rank, group, piece), from, array.bytes));
    }
  }
  return Status::Ok();
}

// Other processes cannot access arrays that XLA has allocated, only this device's segment.
template <typename Call>
Status CopyIntoSegment(Call& call, const Group& group, const AllGatherProblem& p, const std::vector<Gathered>& arrays,
                       std::vector<void*>& addresses) {
  if (p.put) return Status::Failed(group.name + " cannot write to arrays of other processes: use protocol='get'");
  char* const begin = group.segments->data(group.rank);
  char* next = begin;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const int64_t bytes = arrays[i].pieces * arrays[i].bytes;
    if (next + bytes > begin + group.segments->bytes()) return SegmentTooSmall(group);
    TE_JAX_TRY(call.Copy(Stream::kMain, next, arrays[i].mine, bytes));
    addresses[i] = next;
    next += (bytes + kSegmentAlignment - 1) / kSegmentAlignment * kSegmentAlignment;
  }
  return Status::Ok();
}

// Get: every device reads its peers' parts, those of its next neighbour first, so that no two devices read from the
// same peer at the same time. Put: every device writes its part to its peers, its previous neighbour first; they wait
// for events of the second rendezvous. Arrays that GEMMs need come before those that are only gathered.
template <typename Call>
Status RunAllGather(Call& call, const Group& group, const AllGatherProblem& p) {
  const int size = group.size(), rank = group.rank;
  const std::vector<Gathered> arrays = AllOf(p);
  const size_t urgent = p.scales.bytes != 0 ? 2 : 1;
  CallRendezvous rendezvous(call, group, TermsOf(group, p));
  TE_JAX_TRY(call.Begin());
  std::vector<void*> addresses;
  for (const Gathered& array : arrays) addresses.push_back(p.put ? array.all : const_cast<void*>(array.mine));
  if (group.segments != nullptr) TE_JAX_TRY(CopyIntoSegment(call, group, p, arrays, addresses));
  void* ready = nullptr;
  TE_JAX_TRY(RecordForPeers(call, group, Stream::kMain, 0, ready));
  TE_JAX_TRY(MultiplyPart(call, group, p, rank, 0));
  TE_JAX_TRY(rendezvous.Start(std::move(addresses), ready));

  TE_JAX_TRY(call.Wait(Stream::kCopy, ready));
  auto peer_at = [&](int step) { return (rank + (p.put ? size - step : step)) % size; };
  std::vector<void*> copied(size);  // events after the urgent copies, by rank of the peer
  void* last = ready;
  for (int step = 1; step < size; ++step) {
    const int peer = peer_at(step);
    TE_JAX_TRY(call.Wait(Stream::kCopy, rendezvous.AtStart(peer).event));
    TE_JAX_TRY(CopyParts(call, group, arrays, rendezvous.AtStart(peer), peer, p.put, 0, urgent));
    TE_JAX_TRY(call.Record(Stream::kCopy, copied[peer]));
    last = copied[peer];
  }
  const bool more = arrays.size() > urgent;
  for (int step = 1; more && step < size; ++step) {
    const int peer = peer_at(step);
    TE_JAX_TRY(CopyParts(call, group, arrays, rendezvous.AtStart(peer), peer, p.put, urgent, arrays.size()));
  }
  // This device is done with its peers' arrays. Peers that it has put only urgent arrays to wait for the events above.
  const bool records_done = !p.put || more;
  void* done = nullptr;
  if (records_done) {
    TE_JAX_TRY(RecordForPeers(call, group, Stream::kCopy, 1, done));
    last = done;
  }
  for (const Gathered& array : arrays) {
    if (!array.with_mine) continue;
    for (int64_t piece = 0; piece < array.pieces; ++piece) {
      TE_JAX_TRY(call.Copy(Stream::kCopy, array.At(rank, group, piece), array.Part(rank, group, piece), array.bytes));
    }
    last = nullptr;
    TE_JAX_TRY(call.Record(Stream::kCopy, last));
  }
  auto multiply_others = [&] {
    for (int step = 1; step < size; ++step) {
      const int peer = (rank + step) % size;  // the order in which peers send to this device
      TE_JAX_TRY(call.Wait(GemmStream(step), p.put ? rendezvous.AtEnd(peer).EventFor(rank) : copied[peer]));
      TE_JAX_TRY(MultiplyPart(call, group, p, peer, step));
    }
    return Status::Ok();
  };
  if (!p.put) TE_JAX_TRY(multiply_others());
  TE_JAX_TRY(rendezvous.End(done, copied));
  if (p.put) TE_JAX_TRY(multiply_others());

  if (size > 1) TE_JAX_TRY(WaitForStream(call, Stream::kMain, Stream::kSide));
  TE_JAX_TRY(call.Wait(Stream::kMain, last));
  for (int step = 1; records_done && step < size; ++step) {
    TE_JAX_TRY(call.Wait(Stream::kMain, rendezvous.AtEnd((rank + step) % size).event));
  }
  return rendezvous.Finish();
}

// The GEMM of the rows that one device owns with a weight, added to the GEMMs with the weights before, or to `added`.
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

// The GEMMs of the rows that one device owns with all weights.
template <typename Call>
Status MultiplyRows(Call& call, const Group& group, const ReduceScatterProblem& p, int owner, char* to,
                    const char* added) {
  for (size_t i = 0; i < p.products.size(); ++i) {
    TE_JAX_TRY(call.Multiply(Stream::kMain, ProductOfRows(group, p, i, owner, to, added)));
  }
  return Status::Ok();
}

// Every device multiplies the rows of its next neighbour first and its own last: nothing is left to send at the end,
// and no two devices send to the same peer at the same time. All parts are added up once, in float32; between two
// devices the last GEMM adds them. GEMMs of several weights are added up in float32 before that, and rounded while the
// next ones run.
template <typename Call>
Status RunReduceScatter(Call& call, const Group& group, ReduceScatterProblem p) {
  const int size = group.size(), rank = group.rank, previous = (rank + size - 1) % size;
  const int64_t bytes = p.BytesOfPart();
  CallRendezvous rendezvous(call, group, TermsOf(group, p));
  TE_JAX_TRY(call.Begin());
  if (group.segments != nullptr) {
    if (p.Parts(size) * bytes > group.segments->bytes()) return SegmentTooSmall(group);
    p.received = group.segments->data(rank);
  }
  void* ready = nullptr;
  TE_JAX_TRY(RecordForPeers(call, group, Stream::kMain, 0, ready));
  TE_JAX_TRY(rendezvous.Start({p.received}, ready));

  std::vector<void*> sent(size);  // by owner
  void* rounded[2] = {};          // events after which sums may be overwritten
  const auto add_up = [&](int step, int owner) {
    if (step >= 2) TE_JAX_TRY(call.Wait(Stream::kMain, rounded[step % 2]));
    return MultiplyRows(call, group, p, owner, reinterpret_cast<char*>(p.SumsOf(step)), nullptr);
  };
  for (int step = 0; step < size - 1; ++step) {
    const int owner = (rank + step + 1) % size;
    const Contribution& peer = rendezvous.AtStart(owner);
    char* const received = static_cast<char*>(peer.arrays[0]) + PartFrom(rank, owner, size) * bytes;
    if (p.outgoing == nullptr) {
      TE_JAX_TRY(call.Wait(Stream::kMain, peer.event));
      TE_JAX_TRY(MultiplyRows(call, group, p, owner, received, nullptr));
      TE_JAX_TRY(call.Record(Stream::kMain, sent[owner]));
      continue;
    }
    char* const outgoing = static_cast<char*>(p.outgoing) + step * bytes;
    TE_JAX_TRY(p.sums != nullptr ? add_up(step, owner) : MultiplyRows(call, group, p, owner, outgoing, nullptr));
    TE_JAX_TRY(WaitForStream(call, Stream::kCopy, Stream::kMain));
    if (p.sums != nullptr) {
      TE_JAX_TRY(call.Sum(Stream::kCopy, p, {nullptr, 0, p.SumsOf(step), nullptr, outgoing}));
      rounded[step % 2] = nullptr;
      if (step + 2 < size) TE_JAX_TRY(call.Record(Stream::kCopy, rounded[step % 2]));
    }
    TE_JAX_TRY(call.Wait(Stream::kCopy, peer.event));
    TE_JAX_TRY(call.Copy(Stream::kCopy, received, outgoing, bytes));
    TE_JAX_TRY(call.Record(Stream::kCopy, sent[owner]));
  }
  void* all_sent = nullptr;  // across processes, where each device has one event
  if (group.segments != nullptr) {
    TE_JAX_TRY(RecordForPeers(call, group, p.outgoing == nullptr ? Stream::kMain : Stream::kCopy, 1, all_sent));
  }
  TE_JAX_TRY(rendezvous.End(all_sent, sent));

  auto wait_for = [&](int sender) {
    const Contribution& peer = rendezvous.AtEnd(sender);
    return call.Wait(Stream::kMain, group.segments != nullptr ? peer.event : peer.EventFor(rank));
  };
  if (p.LastProductAdds(size)) {
    if (size > 1) TE_JAX_TRY(wait_for(previous));
    const char* const added = size > 1 ? static_cast<const char*>(p.received) : nullptr;
    TE_JAX_TRY(MultiplyRows(call, group, p, rank, static_cast<char*>(p.z), added));
  } else {
    char* const own = static_cast<char*>(p.received) + PartFrom(rank, rank, size) * bytes;
    TE_JAX_TRY(p.sums != nullptr ? add_up(size - 1, rank) : MultiplyRows(call, group, p, rank, own, nullptr));
    for (int step = 1; step < size; ++step) TE_JAX_TRY(wait_for((rank + step) % size));
    const float* const sums = p.sums != nullptr ? p.SumsOf(size - 1) : nullptr;
    TE_JAX_TRY(call.Sum(Stream::kMain, p, {p.received, p.Parts(size), sums, p.bias, p.z}));
  }
  if (size > 1) TE_JAX_TRY(call.Wait(Stream::kMain, sent[previous]));  // the last copy from this device
  return rendezvous.Finish();
}

}  // namespace te::collective_gemm
