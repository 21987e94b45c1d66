// Files in shared memory that the processes of one user exchange.
//
// A file that is opened must have a name that this package makes, be regular, belong to this user and have the size
// that is expected. Processes of the same user are trusted not to change such files afterwards.
//
// Whoever creates a file keeps it locked (flock) while others can open it. The kernel unlocks it when the process ends,
// however it ends and in whichever container: a file without a lock is one of a dead process, whose peers do not wait
// for it any longer, and which the next process that shares memory removes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "common/status.h"

namespace te::collective_gemm {

// A file in shared memory, mapped. Its creator keeps it locked until Release.
class SharedMemory {
 public:
  static Status Create(int64_t bytes, std::unique_ptr<SharedMemory>& made);
  static Status Open(std::string_view name, int64_t bytes, std::unique_ptr<SharedMemory>& opened);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void* data() const { return data_; }
  const std::string& name() const { return name_; }
  // Whether the process that created it has ended, or does not offer it any longer.
  bool IsAbandoned() const;
  // Closes the file, and removes it where this process has created it. The memory stays.
  void Release();

 private:
  SharedMemory(std::string name, int file);
  Status Map(int file, int64_t bytes);

  std::string name_;
  int file_;  // -1 once it is closed
  bool created_ = false;
  int process_;  // that opened the file: a fork must leave it alone
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Removes the files in shared memory of processes that have ended.
void RemoveAbandonedFiles();

}  // namespace te::collective_gemm
