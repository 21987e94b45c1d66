#include "collective_gemm/shared_memory.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <random>
#include <set>
#include <utility>

namespace te::collective_gemm {
namespace {

constexpr const char* kFolder = "/dev/shm/";
constexpr std::string_view kPrefix = "te_jax-";
constexpr size_t kRandomDigits = 16;

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

// The files that this process has open. A child of fork would keep them locked after its parent has ended: it closes
// them when it begins.
class OpenFiles {
 public:
  static OpenFiles& Global() {
    static auto* files = [] {
      auto* made = new OpenFiles;
      pthread_atfork([] { Global().mutex_.lock(); }, [] { Global().mutex_.unlock(); },
                     [] {
                       for (const int file : Global().files_) close(file);
                       Global().files_.clear();
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

}  // namespace

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

}  // namespace te::collective_gemm
