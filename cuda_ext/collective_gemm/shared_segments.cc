#include "collective_gemm/shared_segments.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
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
#include <set>
#include <thread>
#include <tuple>
#include <utility>

namespace te::collective_gemm {
namespace {

constexpr const char* kFolder = "/dev/shm/";
constexpr std::string_view kPrefix = "te_jax-";
constexpr size_t kRandomDigits = 16;
constexpr std::chrono::milliseconds kBetweenLooks{100};  // for processes that have ended

std::string PathOf(const std::string& name) { return kFolder + name; }

Status SystemError(const std::string& what) { return Status::Failed(what + ": " + std::strerror(errno)); }

// te_jax-PID-RANDOM. Every file has another random number: processes of two containers may have the same PID, and a
// process that forks has the same state as its child.
std::string NewName() {
  std::random_device random;
  uint64_t number = uint64_t{random()} << 32 | random();
  std::string digits(kRandomDigits, '0');
  for (char& digit : digits) {
    digit = "0123456789abcdef"[number & 15];
    number >>= 4;
  }
  return std::string(kPrefix) + std::to_string(getpid()) + "-" + digits;
}

bool IsOurName(std::string_view name) {
  if (!name.starts_with(kPrefix) || name.size() <= kPrefix.size() + kRandomDigits + 1) return false;
  const std::string_view number = name.substr(name.size() - kRandomDigits);
  const std::string_view pid = name.substr(kPrefix.size(), name.size() - kPrefix.size() - kRandomDigits - 1);
  return pid.size() <= 10 && pid.find_first_not_of("0123456789") == pid.npos &&
         number.find_first_not_of("0123456789abcdef") == number.npos && name[name.size() - kRandomDigits - 1] == '-';
}

bool IsOurs(const struct stat& file) { return S_ISREG(file.st_mode) && file.st_uid == geteuid(); }

int Flock(int file, int operation) {
  int result;
  do result = flock(file, operation);
  while (result != 0 && errno == EINTR);
  return result;
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

Registry*& RegistryOfProcess() {
  static auto* registry = new Registry;
  return registry;
}
Registry& GlobalRegistry() { return *RegistryOfProcess(); }

// The files that this process has open. A child would keep them locked after its parent has ended: it closes them when
// it begins, and knows nothing of what its parent shares.
class OpenFiles {
 public:
  static OpenFiles& Global() {
    static auto* files = [] {
      auto* made = new OpenFiles;
      pthread_atfork([] { Global().mutex_.lock(); }, [] { Global().mutex_.unlock(); },
                     [] {
                       for (const int file : Global().files_) close(file);
                       Global().files_.clear();
                       RegistryOfProcess() = new Registry;
                       Global().mutex_.unlock();
                     });
      return made;
    }();
    return *files;
  }
  int Open(const std::string& name, int flags) {
    const std::lock_guard lock(mutex_);
    const int file = open(PathOf(name).c_str(), flags | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file >= 0) files_.insert(file);
    return file;
  }
  void Close(int file) {
    const std::lock_guard lock(mutex_);
    files_.erase(file);
    close(file);
  }

 private:
  std::mutex mutex_;
  std::set<int> files_;
};

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
  if (bytes < 1) return Status::Failed(std::to_string(bytes) + " bytes cannot be shared: it must be one at least");
  std::unique_ptr<SharedMemory> memory;
  struct stat found{};
  while (found.st_nlink == 0) {  // or another process has removed the file before it was locked
    std::string name = NewName();
    const int file = OpenFiles::Global().Open(name, O_CREAT | O_EXCL);
    if (file < 0 && errno == EEXIST) continue;
    if (file < 0) return SystemError("creating shared memory");
    memory.reset(new SharedMemory(std::move(name), file));
    memory->created_ = true;
    if (Flock(file, LOCK_EX) != 0 || fstat(file, &found) != 0) return SystemError("locking shared memory");
  }
  // ftruncate would not do: a process that writes to memory that the file system does not have is killed (SIGBUS).
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(memory->file_, 0, bytes);
  if (error != 0) {
    return Status::Failed("allocating " + std::to_string(bytes) + " bytes in " + kFolder + ": " + std::strerror(error));
  }
  // Mapped through another descriptor: a mapping keeps the lock of its own, also one that a child inherits.
  const int file = OpenFiles::Global().Open(memory->name_, 0);
  if (file < 0) return SystemError("opening shared memory");
  const Status mapped = memory->Map(file, bytes);
  OpenFiles::Global().Close(file);
  TE_JAX_TRY(mapped);
  made = std::move(memory);
  return Status::Ok();
}

Status SharedMemory::Open(std::string_view name, int64_t bytes, std::unique_ptr<SharedMemory>& opened) {
  if (!IsOurName(name)) return Status::Failed("its text is malformed: it names no shared memory of te_jax");
  const int file = OpenFiles::Global().Open(std::string(name), 0);
  if (file < 0 && errno == ENOENT) {
    return Status::Failed("its process has ended, or has a /dev/shm of its own, in another container");
  }
  if (file < 0) return SystemError("opening its shared memory");
  std::unique_ptr<SharedMemory> memory(new SharedMemory(std::string(name), file));
  struct stat found{};
  if (fstat(file, &found) != 0) return SystemError("opening its shared memory");
  if (!IsOurs(found)) return Status::Failed("its shared memory is not a regular file of this user");
  if (found.st_size != bytes) {
    return Status::Failed("its shared memory has " + std::to_string(found.st_size) + " bytes instead of " +
                          std::to_string(bytes));
  }
  TE_JAX_TRY(memory->Map(file, bytes));
  opened = std::move(memory);
  return Status::Ok();
}

SharedMemory::SharedMemory(std::string name, int file) : name_(std::move(name)), file_(file), process_(getpid()) {}

Status SharedMemory::Map(int file, int64_t bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data == MAP_FAILED) return SystemError("mapping shared memory");
  data_ = data;
  bytes_ = bytes;
  return Status::Ok();
}

SharedMemory::~SharedMemory() {
  Release();
  if (data_ != nullptr) munmap(data_, bytes_);
}

bool SharedMemory::IsAbandoned() const {
  if (file_ < 0 || Flock(file_, LOCK_SH | LOCK_NB) != 0) return false;
  Flock(file_, LOCK_UN);
  return true;
}

void SharedMemory::Release() {
  if (file_ < 0 || process_ != getpid()) return;
  if (created_) unlink(PathOf(name_).c_str());
  OpenFiles::Global().Close(std::exchange(file_, -1));  // last: without its lock a file is one of a dead process
}

void RemoveAbandonedFiles() {
  DIR* const folder = opendir(kFolder);
  if (folder == nullptr) return;
  while (const dirent* const entry = readdir(folder)) {
    if (!IsOurName(entry->d_name)) continue;
    const int file = OpenFiles::Global().Open(entry->d_name, 0);
    if (file < 0) continue;
    struct stat found{};
    if (fstat(file, &found) == 0 && IsOurs(found) && Flock(file, LOCK_EX | LOCK_NB) == 0) {
      unlink(PathOf(entry->d_name).c_str());
    }
    OpenFiles::Global().Close(file);
  }
  closedir(folder);
}

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
