#include "collective_gemm/shared_segments.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <new>
#include <thread>
#include <tuple>
#include <utility>

namespace te::collective_gemm {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks{100};  // for processes that have ended

std::string HostName() {
  char name[64] = {};
  const int file = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  if (file < 0) return "unknown";
  const ssize_t length = read(file, name, 36);
  close(file);
  return std::string(name, std::max<ssize_t>(length, 0));
}

// Descriptions are lines.
std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    lines.push_back(text.substr(begin, end - begin));
  }
  return lines;
}

// Known to all threads of this process.
struct Registry {
  std::mutex mutex;
  std::map<int, int> ordinals, places;  // of this process's devices, by each other
  std::map<std::tuple<std::vector<int>, int, int>, std::shared_ptr<SharedSegments>> attempts;
  std::map<std::pair<std::vector<int>, int>, std::vector<std::shared_ptr<SharedSegments>>> segments;
};

// A child of fork begins with an empty registry: it shares nothing with the peers of its parent.
Registry*& RegistryOfProcess() {
  static auto* registry = [] {
    pthread_atfork(nullptr, nullptr, [] { RegistryOfProcess() = new Registry; });
    return new Registry;
  }();
  return registry;
}
Registry& GlobalRegistry() { return *RegistryOfProcess(); }

template <typename Map>
typename Map::mapped_type Lookup(Map Registry::* map, const typename Map::key_type& key,
                                 typename Map::mapped_type otherwise) {
  Registry& registry = GlobalRegistry();
  const std::lock_guard lock(registry.mutex);
  const auto found = (registry.*map).find(key);
  return found == (registry.*map).end() ? otherwise : found->second;
}

}  // namespace

void SetOrdinals(const std::map<int, int>& ordinals) {
  Registry& registry = GlobalRegistry();
  const std::lock_guard lock(registry.mutex);
  for (const auto& [place, ordinal] : ordinals) {
    registry.ordinals[place] = ordinal;
    registry.places[ordinal] = place;
  }
}

int OrdinalOf(int place) { return Lookup(&Registry::ordinals, place, -1); }
int PlaceOf(int ordinal) { return Lookup(&Registry::places, ordinal, -1); }

Status SharedSegments::Create(std::vector<int> participants, int rank, int device, int64_t bytes,
                              std::shared_ptr<SharedSegments>& created) {
  const size_t size = participants.size();
  if (size > kMaxParticipants) {
    return Status::Failed("a group has " + std::to_string(size) + " devices; at most " +
                          std::to_string(kMaxParticipants) + " can share memory");
  }
  if (rank < 0 || rank >= static_cast<int>(size)) {
    return Status::Failed("a group of " + std::to_string(size) + " devices has no rank " + std::to_string(rank));
  }
  if (bytes < 1) return Status::Failed(std::to_string(bytes) + " bytes cannot be shared: it must be one at least");
  RemoveAbandonedFiles();
  std::shared_ptr<SharedSegments> shared(new SharedSegments);
  shared->participants_ = std::move(participants);
  shared->rank_ = rank;
  shared->device_ = device;
  shared->bytes_ = bytes;
  shared->memories_.resize(size);
  shared->records_.resize(size);
  shared->segments_.resize(size);
  std::unique_ptr<SharedMemory> memory;
  TE_JAX_TRY(SharedMemory::Create(sizeof(Record), memory));
  shared->records_[rank] = new (memory->data()) Record{};
  shared->memories_[rank] = std::move(memory);
  std::unique_ptr<Segment> segment;
  TE_JAX_TRY(CreateSegment(device, bytes, segment));
  shared->segments_[rank] = std::move(segment);
  created = std::move(shared);
  return Status::Ok();
}

std::string SharedSegments::Describe() const {
  return HostName() + "\n" + std::to_string(bytes_) + "\n" + memories_[rank_]->name() + "\n" +
         segments_[rank_]->Describe() + "\n";
}

Status SharedSegments::Join(const std::vector<std::string>& texts,
                            const std::vector<std::shared_ptr<SharedSegments>>& locals,
                            std::chrono::nanoseconds timeout) {
  const std::string name = "device " + NameOf(participants_[rank_]);
  if (joining_.exchange(true)) return Status::Failed(name + " joins its segment for the second time");
  if (Status status = OpenAll(texts, locals); !status.ok()) {
    Break();
    return status;
  }
  std::vector<Terms> terms;
  std::vector<int> absent;
  if (!Barrier({}, timeout, terms, absent)) {
    if (!dead_.empty()) {
      RemoveAbandonedFiles();
      return Status::Failed("the process of device " + Names(dead_) + " has ended: start all processes anew");
    }
    if (absent.empty()) return Status::Failed("another device of the group gave up");
    return Status::Failed("device " + Names(absent) + " did not open the memory of " + name + " in time, or gave up");
  }
  joined_ = true;
  for (const auto& [process, rank] : watched_) memories_[rank]->Release();
  watched_.clear();
  memories_[rank_]->Release();
  segments_[rank_]->AllOpened();
  return Status::Ok();
}

Status SharedSegments::OpenAll(const std::vector<std::string>& texts,
                               const std::vector<std::shared_ptr<SharedSegments>>& locals) {
  if (texts.size() != participants_.size() || locals.size() != participants_.size()) {
    return Status::Failed("a group of " + std::to_string(participants_.size()) + " devices is described by " +
                          std::to_string(texts.size()) + " texts");
  }
  for (size_t rank = 0; rank < participants_.size(); ++rank) {
    if (static_cast<int>(rank) == rank_) continue;
    const std::string name = "device " + NameOf(participants_[rank]);
    if (ProcessOf(participants_[rank]) != ProcessOf(participants_[rank_])) {
      if (Status status = OpenPeer(rank, texts[rank]); !status.ok()) {
        return Status::Failed("the memory of " + name + " cannot be opened: " + status.reason());
      }
    } else if (const auto& local = locals[rank]; local != nullptr && local->bytes_ == bytes_) {
      memories_[rank] = local->memories_[rank];
      segments_[rank] = local->segments_[rank];
    } else {
      return Status::Failed(name + ", which this process drives, has no segment of " + std::to_string(bytes_) +
                            " bytes");
    }
    records_[rank] = static_cast<Record*>(memories_[rank]->data());
  }
  return Status::Ok();
}

Status SharedSegments::OpenPeer(size_t rank, const std::string& text) {
  const std::vector<std::string> lines = Lines(text);
  if (lines.size() != 4)
    return Status::Failed("its text is malformed: run the same version of te_jax in all processes");
  if (lines[0] != HostName()) return Status::Failed("the devices are not of one host: use transport='ring' or 'xla'");
  if (lines[1] != std::to_string(bytes_)) {
    return Status::Failed("its text is malformed: it does not describe " + std::to_string(bytes_) + " bytes");
  }
  std::unique_ptr<SharedMemory> memory;
  TE_JAX_TRY(SharedMemory::Open(lines[2], sizeof(Record), memory));
  std::unique_ptr<Segment> segment;
  TE_JAX_TRY(OpenSegment(device_, bytes_, lines[3], segment));
  memories_[rank] = std::move(memory);
  segments_[rank] = std::move(segment);
  if (!watched_.emplace(ProcessOf(participants_[rank]), rank).second) memories_[rank]->Release();
  return Status::Ok();
}

bool SharedSegments::HasArrived(size_t rank, uint64_t barrier) const {
  return records_[rank]->arrivals[barrier % 2].barrier.load(std::memory_order_acquire) >= barrier;
}

bool SharedSegments::IsBroken() const {
  return std::any_of(records_.begin(), records_.end(), [](const Record* record) { return record->broken.load() != 0; });
}

// Devices that will not arrive, because their processes have ended.
std::vector<int> SharedSegments::Dead(uint64_t barrier) const {
  std::vector<int> dead;
  for (const auto& [process, watched] : watched_) {
    // A process also lets go of its file when it gives up, which it says before, and when all have arrived.
    if (!memories_[watched]->IsAbandoned() || IsBroken()) continue;
    for (size_t rank = 0; rank < participants_.size(); ++rank) {
      if (ProcessOf(participants_[rank]) == process && !HasArrived(rank, barrier)) dead.push_back(participants_[rank]);
    }
  }
  return dead;
}

bool SharedSegments::Barrier(const Terms& mine, std::chrono::nanoseconds timeout, std::vector<Terms>& all,
                             std::vector<int>& absent) {
  constexpr auto kSpin = std::chrono::microseconds(50);
  const auto begin = std::chrono::steady_clock::now();
  auto looked = std::chrono::nanoseconds(0);
  const uint64_t count = ++barriers_;
  if (IsBroken()) return false;
  Record::Arrival& arrival = records_[rank_]->arrivals[count % 2];
  arrival.terms = mine;
  arrival.barrier.store(count, std::memory_order_release);
  for (size_t i = 0; i < participants_.size(); ++i) {
    while (!HasArrived(i, count)) {
      const auto waited = std::chrono::steady_clock::now() - begin;
      if (waited > looked + kBetweenLooks) {
        looked = waited;
        dead_ = Dead(count);
      }
      const bool gives_up = waited > timeout || !dead_.empty();
      if (gives_up || IsBroken()) {
        for (size_t j = 0; j < participants_.size(); ++j) {
          if (!HasArrived(j, count)) absent.push_back(participants_[j]);
        }
        if (absent.empty()) break;  // the last one has just arrived
        Break();
        return false;
      }
      if (waited > kSpin) std::this_thread::sleep_for(std::chrono::microseconds(waited > 20 * kSpin ? 200 : 10));
    }
  }
  all.clear();
  for (const Record* const record : records_) all.push_back(record->arrivals[count % 2].terms);
  if (std::any_of(all.begin(), all.end(), [&](const Terms& terms) { return terms != mine; })) {
    Break();
    return true;
  }
  return !IsBroken();
}

void KeepAttempt(const std::vector<int>& participants, int number, int rank, std::shared_ptr<SharedSegments> segments) {
  Registry& registry = GlobalRegistry();
  const std::lock_guard lock(registry.mutex);
  registry.attempts[{participants, number, rank}] = std::move(segments);
}

std::shared_ptr<SharedSegments> FindAttempt(const std::vector<int>& participants, int number, int rank) {
  return Lookup(&Registry::attempts, {participants, number, rank}, nullptr);
}

void ForgetAttempt(const std::vector<int>& participants, int number) {
  Registry& registry = GlobalRegistry();
  const std::lock_guard lock(registry.mutex);
  for (size_t rank = 0; rank < participants.size(); ++rank) {
    const auto found = registry.attempts.find({participants, number, static_cast<int>(rank)});
    if (found == registry.attempts.end()) continue;
    if (!found->second->joined()) found->second->Break();
    registry.attempts.erase(found);
  }
}

void KeepSegments(const std::vector<int>& participants, int rank, std::shared_ptr<SharedSegments> segments) {
  Registry& registry = GlobalRegistry();
  const std::lock_guard lock(registry.mutex);
  registry.segments[{participants, rank}].push_back(std::move(segments));
}

void ForgetSegments() {
  Registry& registry = GlobalRegistry();
  const std::lock_guard lock(registry.mutex);
  registry.segments.clear();
}

std::shared_ptr<SharedSegments> FindSegments(const std::vector<int>& participants, int rank, int64_t bytes) {
  for (const auto& shared : Lookup(&Registry::segments, {participants, rank}, {})) {
    if (shared->bytes() >= bytes) return shared;
  }
  return nullptr;
}

}  // namespace te::collective_gemm
