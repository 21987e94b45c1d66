#include "collective_gemm/shared_segments.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <random>
#include <thread>
#include <tuple>
#include <utility>

namespace te::collective_gemm {
namespace {

constexpr const char* kFolder = "/dev/shm/";

Status SystemError(const std::string& what) { return Status::Failed(what + ": " + std::strerror(errno)); }

// Differs between processes, also between those of two containers, which may have the same number.
const std::string& ProcessName() {
  static const auto* name = [] {
    std::random_device random;
    return new std::string(std::to_string(getpid()) + "-" + std::to_string(random()) + "-" + std::to_string(random()));
  }();
  return *name;
}

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

Registry& GlobalRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

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

Status SharedMemory::Create(int64_t bytes, std::unique_ptr<SharedMemory>& made) {
  static std::atomic<int> counter{0};
  const std::string name = "te_jax-" + ProcessName() + "-" + std::to_string(counter++);
  const int file = open((kFolder + name).c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) return SystemError("creating shared memory");
  // ftruncate would not do: a process that writes to memory that the file system does not have is killed (SIGBUS).
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(file, 0, bytes);
  close(file);
  if (error != 0) {
    unlink((kFolder + name).c_str());
    return Status::Failed("allocating " + std::to_string(bytes) + " bytes in " + kFolder + ": " + std::strerror(error));
  }
  TE_JAX_TRY(Open(name, bytes, made));
  made->linked_ = true;
  return Status::Ok();
}

Status SharedMemory::Open(const std::string& name, int64_t bytes, std::unique_ptr<SharedMemory>& opened) {
  const int file = open((kFolder + name).c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return SystemError("opening shared memory of another process");
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (data == MAP_FAILED) return SystemError("mapping shared memory");
  opened.reset(new SharedMemory(name, data, bytes));
  return Status::Ok();
}

SharedMemory::~SharedMemory() {
  Unlink();
  munmap(data_, bytes_);
}

void SharedMemory::Unlink() {
  if (std::exchange(linked_, false)) unlink((kFolder + name_).c_str());
}

Status SharedSegments::Create(std::vector<int> participants, int rank, int device, int64_t bytes,
                              std::shared_ptr<SharedSegments>& created) {
  if (participants.size() > kMaxParticipants) {
    return Status::Failed("a group has " + std::to_string(participants.size()) + " devices; at most " +
                          std::to_string(kMaxParticipants) + " can share memory");
  }
  std::shared_ptr<SharedSegments> shared(new SharedSegments);
  shared->participants_ = std::move(participants);
  shared->rank_ = rank;
  shared->device_ = device;
  shared->bytes_ = bytes;
  shared->segments_.resize(shared->participants_.size());
  std::unique_ptr<Segment> segment;
  TE_JAX_TRY(CreateSegment(device, bytes, segment));
  shared->segments_[rank] = std::move(segment);
  if (rank == 0) {
    TE_JAX_TRY(SharedMemory::Create(sizeof(SharedBarrier), shared->barrier_memory_));
    shared->barrier_ = new (shared->barrier_memory_->data()) SharedBarrier{};
  }
  created = std::move(shared);
  return Status::Ok();
}

std::string SharedSegments::Describe() const {
  const std::string barrier = barrier_memory_ ? barrier_memory_->name() : "";
  const std::string address = std::to_string(reinterpret_cast<uintptr_t>(this));
  return HostName() + "\n" + ProcessName() + "\n" + barrier + "\n" + address + "\n" + segments_[rank_]->Describe() +
         "\n";
}

Status SharedSegments::Join(const std::vector<std::string>& descriptions, std::chrono::nanoseconds timeout) {
  for (size_t rank = 0; rank < participants_.size(); ++rank) {
    const std::vector<std::string> lines = Lines(descriptions[rank]);
    if (lines.size() != 5) return Status::Failed("a process does not describe its segment");
    if (lines[0] != HostName()) {
      return Status::Failed("the devices are not of one host: use transport='ring' or 'xla'");
    }
    if (rank == 0 && rank_ != 0) {
      TE_JAX_TRY(SharedMemory::Open(lines[2], sizeof(SharedBarrier), barrier_memory_));
      barrier_ = static_cast<SharedBarrier*>(barrier_memory_->data());
    }
    if (static_cast<int>(rank) == rank_) continue;
    if (lines[1] == ProcessName()) {  // a device of this process, whose segment is mapped already
      segments_[rank] = reinterpret_cast<const SharedSegments*>(std::stoull(lines[3]))->segments_[rank];
      continue;
    }
    std::unique_ptr<Segment> segment;
    TE_JAX_TRY(OpenSegment(device_, bytes_, lines[4], segment));
    segments_[rank] = std::move(segment);
  }
  std::vector<int> absent;
  if (!Barrier(timeout, absent)) return Status::Failed("other processes have not opened this one's segment in time");
  joined_ = true;
  barrier_memory_->Unlink();
  segments_[rank_]->AllOpened();
  return Status::Ok();
}

bool SharedSegments::Barrier(std::chrono::nanoseconds timeout, std::vector<int>& absent) {
  constexpr auto kSpin = std::chrono::microseconds(50);
  const auto begin = std::chrono::steady_clock::now();
  const uint64_t count = ++barriers_;
  SharedBarrier& barrier = *barrier_;
  if (barrier.broken.load() != 0) return false;
  barrier.participants[rank_].arrived.store(count, std::memory_order_release);
  for (size_t i = 0; i < participants_.size(); ++i) {
    while (barrier.participants[i].arrived.load(std::memory_order_acquire) < count) {
      const auto waited = std::chrono::steady_clock::now() - begin;
      const bool late = waited > timeout;
      if (late || barrier.broken.load(std::memory_order_relaxed) != 0) {
        for (size_t j = 0; j < participants_.size(); ++j) {
          if (barrier.participants[j].arrived.load() < count) absent.push_back(participants_[j]);
        }
        if (late && absent.empty()) break;  // the last one has just arrived
        barrier.broken.store(1);
        return false;
      }
      if (waited > kSpin) std::this_thread::sleep_for(std::chrono::microseconds(waited > 20 * kSpin ? 200 : 10));
    }
  }
  return barrier.broken.load() == 0;
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
