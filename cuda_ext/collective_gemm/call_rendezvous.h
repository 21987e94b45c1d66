// The two rendezvous of the host threads of a call, within one process or between several: what each device
// contributes, how all refuse a call that is not the same on all devices, and how a failure reaches the peers.
#pragma once

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "collective_gemm/collective_gemm.h"
#include "common/rendezvous.h"

namespace te::collective_gemm {

// The contribution of a device to a rendezvous.
struct Contribution {
  const Group* group = nullptr;  // of a device that waits; used within a process only
  Terms terms = {};
  std::vector<void*> arrays = {};
  void* event = nullptr;
  std::vector<void*> events_by_rank = {};
  std::atomic<int>* readers = nullptr;
  bool failed = false;

  void* EventFor(int rank) const { return events_by_rank.empty() ? nullptr : events_by_rank[rank]; }
};

// Terms of a call, and what they are called in errors. Devices copy by the sizes that they have themselves: where those
// of a peer are others, they would read and write beyond its arrays.
enum Term { kCall, kKind, kPieces, kBytes, kScales, kOthers, kOtherBytes };
enum Kind : int64_t { kGets, kPuts, kScatters };

inline Terms TermsOf(const Group& group, const AllGatherProblem& p) {
  Terms terms{group.call, p.put ? kPuts : kGets, p.x.pieces, p.x.bytes, p.scales.bytes};
  terms[kOthers] = static_cast<int64_t>(p.others.size());
  for (const Gathered& other : p.others) {  // where there are several, one number stands for all
    const uint64_t mixed = uint64_t{1000003} * terms[kOtherBytes] + static_cast<uint64_t>(other.bytes);
    terms[kOtherBytes] = static_cast<int64_t>(mixed);
  }
  return terms;
}

inline Terms TermsOf(const Group& group, const ReduceScatterProblem& p) {
  return {group.call, kScatters, p.pieces, p.BytesOfPart() / std::max<int64_t>(p.pieces, 1)};
}

inline std::string Describe(int term, int64_t value) {
  static constexpr const char* kTexts[][2] = {{"makes call ", ""},
                                              {},
                                              {"brings ", " pieces"},
                                              {"brings pieces of ", " bytes"},
                                              {"brings ", " bytes of scales"},
                                              {"brings ", " further arrays"},
                                              {"brings further arrays of ", " bytes (of several, a checksum)"}};
  if (term == kKind) {
    return value == kScatters ? "scatters" : value == kPuts ? "gathers by writing" : "gathers by reading";
  }
  return kTexts[term][0] + std::to_string(value) + kTexts[term][1];
}

// Two devices of a process that wait for each other, each in a call of its own.
inline std::string DescribeDifference(const Contribution& first, const Contribution& second) {
  std::string text;
  for (const Contribution* const one : {&first, &second}) {
    const Group& group = *one->group;
    text += (text.empty() ? "device " : ", and device ") + NameOf(group.devices[group.rank]) + " " +
            Describe(kCall, group.call) + ", " + group.name + " of the group " + Names(group.devices);
  }
  return text + "; all must make the same calls, in the same order";
}

// The two rendezvous of one call. A device that has failed must take part in the next one, or its peers would wait in
// vain; then the call is over for all. A call that is destroyed before Finish has failed.
template <typename Call>
class CallRendezvous {
 public:
  CallRendezvous(Call& call, const Group& group, const Terms& terms) : call_(call), group_(group), terms_(terms) {}
  CallRendezvous(const CallRendezvous&) = delete;
  CallRendezvous& operator=(const CallRendezvous&) = delete;
  ~CallRendezvous() {
    if (!finished_) {
      call_.Synchronize();
      if (stage_ < kStages) ReportFailure();
      WaitForPeers();
    }
    for (std::atomic<int>* const readers : held_) readers->fetch_sub(1);
  }

  // The first rendezvous.
  Status Start(std::vector<void*> arrays, void* ready) { return Join({&group_, terms_, std::move(arrays), ready}); }
  // The second one, after this device's streams wait for all events of the first one that they need.
  Status End(void* event, std::vector<void*> events_by_rank) {
    return Join({&group_, terms_, {}, event, std::move(events_by_rank)});
  }
  // After all waits of this device are in its streams.
  Status Finish() {
    finished_ = true;
    return Status::Ok();
  }

  // The contribution of a device to either.
  const Contribution& AtStart(int rank) const { return contributions_[0][rank]; }
  const Contribution& AtEnd(int rank) const { return contributions_[1][rank]; }

 private:
  static constexpr int kStages = 2;

  Status Join(Contribution mine) {
    const int stage = stage_++;
    // Processes share events of their own, which no other call uses.
    mine.readers = group_.segments == nullptr ? call_.Readers() : nullptr;
    if (mine.readers != nullptr) mine.readers->fetch_add(group_.size() - 1);
    const bool met = group_.segments != nullptr ? JoinAcrossProcesses(mine, stage) : JoinInProcess(mine, stage);
    if (!met) {
      stage_ = kStages;
      if (mine.readers != nullptr) mine.readers->fetch_sub(group_.size() - 1);  // no peer has its events
      if (!failure_.difference.empty()) return Status::Failed(failure_.difference);
      return Status::Failed(!failure_.absent.empty() ? TimedOut() : group_.segments != nullptr ? Broken() : Twice());
    }
    Hold(stage);
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (!contributions_[stage][rank].failed) continue;
      stage_ = kStages;
      return Status::Failed(Where() + " gave up because device " + NameOf(group_.devices[rank]) + " failed");
    }
    return Compare(stage);
  }

  // All devices find the same difference, and fail.
  Status Compare(int stage) {
    const Terms& first = contributions_[stage][0].terms;
    for (int rank = 1; rank < group_.size(); ++rank) {
      const Terms& other = contributions_[stage][rank].terms;
      const int term = static_cast<int>(std::mismatch(first.begin(), first.end(), other.begin()).first - first.begin());
      if (term == static_cast<int>(first.size())) continue;
      stage_ = kStages;
      return Status::Failed(group_.name + ", call " + std::to_string(group_.call) + " of the group " +
                            Names(group_.devices) + ": device " + NameOf(group_.devices[0]) + " " +
                            Describe(term, first[term]) + ", and device " + NameOf(group_.devices[rank]) + " " +
                            Describe(term, other[term]) + "; all must make the same calls, of the same shapes");
    }
    return Status::Ok();
  }

  // Keeps the events of peers until this thread has told its device to wait for them.
  void Hold(int stage) {
    for (int rank = 0; rank < group_.size(); ++rank) {
      std::atomic<int>* const readers = contributions_[stage][rank].readers;
      if (rank != group_.rank && readers != nullptr) held_.push_back(readers);
    }
  }

  void ReportFailure() {
    if (group_.segments != nullptr) return group_.segments->Break();
    Contribution failed{&group_, terms_};
    failed.failed = true;
    if (JoinInProcess(failed, stage_)) Hold(stage_);
  }

  // Returns once no peer uses this device's arrays any longer.
  void WaitForPeers() {
    for (const Contribution& peer : contributions_[kStages - 1]) {
      for (void* const event : {peer.event, peer.EventFor(group_.rank)}) {
        if (event != nullptr) call_.SynchronizeEvent(event);
      }
    }
  }

  // A device that has joined the first rendezvous joins the second one too, if only to report a failure, and writes to
  // its peers' arrays until then: the second one has no timeout.
  bool JoinInProcess(const Contribution& mine, int stage) {
    static auto* rendezvous = new Rendezvous<Contribution>(Call::kOneByOne, DescribeDifference);
    return rendezvous->Join(RendezvousKey{group_.run, group_.call, stage, group_.devices}, group_.rank, mine,
                            stage == 0 ? std::optional(group_.timeout) : std::nullopt, contributions_[stage], failure_);
  }

  // Across processes a barrier is enough: arrays lie at the same offsets in every device's segment, and each device has
  // one event for each stage.
  bool JoinAcrossProcesses(const Contribution& mine, int stage) {
    SharedSegments& segments = *group_.segments;
    std::vector<Terms> terms;
    if (!segments.Barrier(mine.terms, group_.timeout, terms, failure_.absent)) return false;
    contributions_[stage].assign(group_.size(), {});
    for (int rank = 0; rank < group_.size(); ++rank) {
      Contribution& peer = contributions_[stage][rank];
      peer.terms = terms[rank];
      for (void* const array : mine.arrays) {
        peer.arrays.push_back(segments.data(rank) + (static_cast<char*>(array) - segments.data(group_.rank)));
      }
      peer.event = segments.event(rank, stage);
    }
    return true;
  }

  std::string Where() const {
    return group_.name + ", call " + std::to_string(group_.call) + ", on device " +
           NameOf(group_.devices[group_.rank]) + " of the group " + Names(group_.devices);
  }

  std::string TimedOut() const {
    return Where() + " waited " + std::to_string(std::chrono::duration<double>(group_.timeout).count()) +
           " s for device " + Names(failure_.absent) +
           ", which did not come: look for what failed there first, or give the call a longer timeout";
  }

  std::string Broken() const {
    return Where() +
           " cannot run: another call of this group failed, and after that its processes do not agree on what "
           "they share: look for the first error, and start them anew";
  }

  std::string Twice() const {
    return Where() + " cannot run: a device makes two calls of this number at once, and each needs one of its own";
  }

  Call& call_;
  const Group& group_;
  const Terms terms_;
  int stage_ = 0;
  bool finished_ = false;
  std::vector<Contribution> contributions_[kStages];  // by rank
  std::vector<std::atomic<int>*> held_;               // the readers of peers' events, until this thread leaves
  Failure failure_;
};

}  // namespace te::collective_gemm
