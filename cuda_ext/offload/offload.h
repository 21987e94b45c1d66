// Copies between device and host memory beside the computation, and the pass of a loop over a stack of such copies.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/executor.h"
#include "common/status.h"

namespace te::offload {

// The copies of a device run in order in each direction, and beside those of the other.
enum class Lane { kToHost, kToDevice };

// The end of a copy: CUDA events, or a flag of a thread.
class Copied {
 public:
  Copied();
  ~Copied();
  Copied(Copied&&) noexcept;
  Copied& operator=(Copied&&) = delete;

 private:
  friend Status CopyBeside(const Executor&, Lane, void*, const void*, int64_t, Copied&);
  friend Status WaitFor(const Executor&, Copied&);
  struct State;
  std::unique_ptr<State> state_;
};

// Begins a copy on a lane once all that the executor was given before is done, and does not wait for it. The copy that
// `copied` was given before is done by then.
Status CopyBeside(const Executor& executor, Lane lane, void* to, const void* from, int64_t bytes, Copied& copied);

// What the executor is given from now on begins after the last copy that `copied` was given to, if there was one.
Status WaitFor(const Executor& executor, Copied& copied);

// Waits here for all copies of the current device that have begun: after an error XLA gives their memory to others. A
// CPU has copies that have not ended only where tests disturb them.
void Settle();

// A copy on the device, in the order of the executor.
Status CopyInOrder(const Executor& executor, void* to, const void* from, int64_t bytes);

// Before every copy of a lane, a random delay of up to so many microseconds, and slots filled with bytes of NaN when a
// pass begins: tests see whether any copy is missed. A CPU copies on threads only then.
void Disturb(int64_t microseconds);
int64_t Disturbance();
Status Poison(const Executor& executor, void* to, int64_t bytes);

// Every layer has a row, and a row the same pieces one after another. Some rows stay on the device, spread evenly over
// the layers, the last one among them if there are any. The others wait in host memory, in a stack: row r of that
// reaches it, or comes from there, through slot r mod (number of slots), which has the layout of a row.
struct Layout {
  int64_t stacked;  // rows in host memory
  int64_t kept;     // rows that stay on the device
  int64_t slots;
  std::vector<int64_t> sizes;  // of the pieces, in bytes
  std::vector<int64_t> offsets;
  int64_t row_bytes;

  static constexpr int64_t kAlignment = 256;

  Layout(int64_t stacked, int64_t kept, int64_t slots, std::vector<int64_t> sizes);

  int64_t rows() const { return stacked + kept; }
  // How many rows of the first so many layers stay: `stays` of te_jax.offload.
  int64_t KeptOf(int64_t layers) const { return layers * kept / rows(); }
};

enum class Direction { kStore, kFetch };

// What a call brings along: the memory of the rows. It is the same in every call of a pass.
struct Memory {
  char* stack;
  char* slots;
  char* kept;
};

// One way over all rows: a forward pass stores them, first to last, and a backward pass fetches them, last to first.
// Calls come in that order for each piece, which the loop's own data flow sees to: the pass counts them, because a
// handler does not see the loop's index. It refuses one too many, and memory that is not where it was.
class Pass {
 public:
  Pass(Direction direction, Layout layout);

  // Copies nothing: a loop that XLA leaves out would not wait for the copies.
  Status Begin(const Executor& executor, const Memory& memory);
  // x [sizes[piece]] becomes a piece of the next row.
  Status Store(const Executor& executor, const Memory& memory, int64_t piece, const void* x, int64_t bytes);
  // x becomes that piece of the next row. The first call begins to fetch as many rows as there are slots.
  Status Fetch(const Executor& executor, const Memory& memory, int64_t piece, void* x, int64_t bytes);
  // All rows were stored: the executor waits for the last copies. Called once for the stack and once for the rows that
  // stay, in any order; `ended` after both.
  Status EndStore(const Executor& executor, const char* rows, bool& ended);
  Status WaitForAll(const Executor& executor);
  bool complete() const;
  const Layout& layout() const { return layout_; }

 private:
  // A row of the stack, or of those that stay.
  struct Place {
    bool stays;
    int64_t row;
  };
  Status Next(Direction direction, const Memory& memory, int64_t piece, int64_t bytes, Place& place);
  Status FetchFirst(const Executor& executor, const Memory& memory);
  Status FetchAhead(const Executor& executor, const Memory& memory, int64_t piece, int64_t row);
  // Of a row of the stack.
  Copied& copied(int64_t row, int64_t piece);
  char* Slot(const Memory& memory, int64_t row, int64_t piece) const;
  char* In(char* rows, int64_t row, int64_t piece) const;

  Direction direction_;
  Layout layout_;
  const char* stack_ = nullptr;  // of the first call that has one
  const char* kept_ = nullptr;
  bool stack_ended_ = false;
  bool kept_ended_ = false;
  std::vector<int64_t> done_;   // rows of each piece
  std::vector<Copied> copied_;  // of each slot and piece
};

// The passes under way, by their slots: each execution of a loop has memory of its own for these while it runs, and
// the loop hands them to every call. A pass that an error ended is replaced by the next one with that memory, which
// waits for its copies.
class Passes {
 public:
  static Passes& All();

  Status Begin(const Executor& executor, Direction direction, Layout layout, const Memory& memory);
  // Null where none was begun.
  std::shared_ptr<Pass> Find(const void* slots);
  void Forget(const void* slots);

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, std::shared_ptr<Pass>> by_slots_;
};

}  // namespace te::offload
