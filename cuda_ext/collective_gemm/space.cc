#include "collective_gemm/space.h"

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

struct Registry {
  std::mutex mutex;
  std::map<std::tuple<std::vector<int>, int, int>, std::shared_ptr<Space>> opening;
  std::map<std::pair<std::vector<int>, int>, std::vector<std::shared_ptr<Space>>> spaces;
};

// What XLA calls the devices of this process.
struct Places {
  std::mutex mutex;
  std::map<int, int> ordinals, places;
};

Places& ThePlaces() {
  static auto* places = new Places;
  return *places;
}

Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

}  // namespace

void SetOrdinals(const std::map<int, int>& ordinals) {
  Places& places = ThePlaces();
  const std::lock_guard lock(places.mutex);
  for (const auto& [place, ordinal] : ordinals) {
    places.ordinals[place] = ordinal;
    places.places[ordinal] = place;
  }
}

int OrdinalOf(int place) {
  Places& places = ThePlaces();
  const std::lock_guard lock(places.mutex);
  const auto found = places.ordinals.find(place);
  return found == places.ordinals.end() ? -1 : found->second;
}

int PlaceOf(int ordinal) {
  Places& places = ThePlaces();
  const std::lock_guard lock(places.mutex);
  const auto found = places.places.find(ordinal);
  return found == places.places.end() ? -1 : found->second;
}

Status SharedMemory::Create(int64_t bytes, std::unique_ptr<SharedMemory>& made) {
  static std::atomic<int> counter{0};
  const std::string name = "te_jax-" + ProcessName() + "-" + std::to_string(counter++);
  const int file = open((kFolder + name).c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) return SystemError("creating shared memory");
  // Not only its size: who writes to memory that the file system then turns out not to have is killed (SIGBUS).
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(file, 0, bytes);
  close(file);
  if (error != 0) {
    unlink((kFolder + name).c_str());
    return Status::Failed("allocating " + std::to_string(bytes) + " bytes in " + kFolder + ": " + std::strerror(error));
  }
  if (Status status = Open(name, bytes, made); !status.ok()) return status;
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

Status Space::Make(std::vector<int> members, int rank, int device, int64_t bytes, std::shared_ptr<Space>& made) {
  if (members.size() > kMostMembers) {
    return Status::Failed("a group has " + std::to_string(members.size()) + " devices; 64 are provided for");
  }
  std::shared_ptr<Space> space(new Space);
  space->members_ = std::move(members);
  space->rank_ = rank;
  space->device_ = device;
  space->bytes_ = bytes;
  space->reaches_.resize(space->members_.size());
  std::unique_ptr<Reach> reach;
  if (Status status = MakeReach(device, bytes, reach); !status.ok()) return status;
  space->reaches_[rank] = std::move(reach);
  if (rank == 0) {
    if (Status status = SharedMemory::Create(sizeof(SharedBarrier), space->barrier_memory_); !status.ok()) {
      return status;
    }
    space->barrier_ = new (space->barrier_memory_->data()) SharedBarrier{};
  }
  made = std::move(space);
  return Status::Ok();
}

std::string Space::Describe() const {
  const std::string barrier = barrier_memory_ ? barrier_memory_->name() : "";
  const std::string address = std::to_string(reinterpret_cast<uintptr_t>(this));
  return HostName() + "\n" + ProcessName() + "\n" + barrier + "\n" + address + "\n" + reaches_[rank_]->Describe() +
         "\n";
}

Status Space::Join(const std::vector<std::string>& descriptions, std::chrono::nanoseconds timeout) {
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    const std::vector<std::string> lines = Lines(descriptions[rank]);
    if (lines.size() != 5) return Status::Failed("a member of the group does not say what it shares");
    if (lines[0] != HostName()) {
      return Status::Failed("the devices are not of one host: use transport='ring' or 'xla'");
    }
    if (rank == 0 && rank_ != 0) {
      if (Status status = SharedMemory::Open(lines[2], sizeof(SharedBarrier), barrier_memory_); !status.ok()) {
        return status;
      }
      barrier_ = static_cast<SharedBarrier*>(barrier_memory_->data());
    }
    if (static_cast<int>(rank) == rank_) continue;
    if (lines[1] == ProcessName()) {  // one of this process: it is there already
      const auto* const peer = reinterpret_cast<const Space*>(std::stoull(lines[3]));
      reaches_[rank] = peer->reaches_[rank];
      continue;
    }
    std::unique_ptr<Reach> reach;
    if (Status status = OpenReach(device_, bytes_, lines[4], reach); !status.ok()) return status;
    reaches_[rank] = std::move(reach);
  }
  std::vector<int> absent;
  if (!Meet(timeout, absent)) return Status::Failed("other processes have not opened what this one shares in time");
  joined_ = true;
  barrier_memory_->Unlink();
  reaches_[rank_]->Announced();
  return Status::Ok();
}

bool Space::Meet(std::chrono::nanoseconds timeout, std::vector<int>& absent) {
  constexpr auto kSpin = std::chrono::microseconds(50);
  const auto begin = std::chrono::steady_clock::now();
  const uint64_t meeting = ++meetings_;
  SharedBarrier& barrier = *barrier_;
  if (barrier.broken.load() != 0) return false;
  barrier.members[rank_].arrived.store(meeting, std::memory_order_release);
  for (size_t i = 0; i < members_.size(); ++i) {
    while (barrier.members[i].arrived.load(std::memory_order_acquire) < meeting) {
      const auto waited = std::chrono::steady_clock::now() - begin;
      const bool late = waited > timeout;
      if (late || barrier.broken.load(std::memory_order_relaxed) != 0) {
        for (size_t j = 0; j < members_.size(); ++j) {
          if (barrier.members[j].arrived.load() < meeting) absent.push_back(members_[j]);
        }
        if (late && absent.empty()) break;  // the last one has just come
        barrier.broken.store(1);
        return false;
      }
      if (waited > kSpin) std::this_thread::sleep_for(std::chrono::microseconds(waited > 20 * kSpin ? 200 : 10));
    }
  }
  return barrier.broken.load() == 0;
}

void KeepOpening(const std::vector<int>& members, int number, int rank, std::shared_ptr<Space> space) {
  Registry& registry = TheRegistry();
  const std::lock_guard lock(registry.mutex);
  registry.opening[{members, number, rank}] = std::move(space);
}

std::shared_ptr<Space> FindOpening(const std::vector<int>& members, int number, int rank) {
  Registry& registry = TheRegistry();
  const std::lock_guard lock(registry.mutex);
  const auto found = registry.opening.find({members, number, rank});
  return found == registry.opening.end() ? nullptr : found->second;
}

void ForgetOpening(const std::vector<int>& members, int number) {
  Registry& registry = TheRegistry();
  const std::lock_guard lock(registry.mutex);
  for (size_t rank = 0; rank < members.size(); ++rank) {
    const auto found = registry.opening.find({members, number, static_cast<int>(rank)});
    if (found == registry.opening.end()) continue;
    if (!found->second->joined()) found->second->Break();
    registry.opening.erase(found);
  }
}

void KeepSpace(const std::vector<int>& members, int rank, std::shared_ptr<Space> space) {
  Registry& registry = TheRegistry();
  const std::lock_guard lock(registry.mutex);
  registry.spaces[{members, rank}].push_back(std::move(space));
}

void ForgetSpaces() {
  Registry& registry = TheRegistry();
  const std::lock_guard lock(registry.mutex);
  registry.spaces.clear();
}

std::shared_ptr<Space> FindSpace(const std::vector<int>& members, int rank, int64_t bytes) {
  Registry& registry = TheRegistry();
  const std::lock_guard lock(registry.mutex);
  for (const std::shared_ptr<Space>& space : registry.spaces[{members, rank}]) {
    if (space->bytes() >= bytes) return space;
  }
  return nullptr;
}

}  // namespace te::collective_gemm
