// The passes of native offload, on the threads that copy where tests disturb them.
//
// Several executions at a time store random rows through slots and fetch them again, through one copy lane each way
// that they share. Copies take random times, and nothing but `Copied` orders them: ThreadSanitizer reports every read
// and write that a pass leaves unordered, and what comes back is compared besides. Between calls each execution writes
// over what it has stored. Some passes are abandoned, and others begin in the same memory, or it is given away because
// another call has failed. Exits with 0 if all went well.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <random>
#include <thread>

#include "offload/offload.h"

namespace te::offload {
namespace {

using Bytes = std::vector<char>;

void Must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.reason().c_str());
  std::_Exit(1);
}

void Must(bool holds, const char* what) {
  if (!holds) Must(Status::Failed(what));
}

// One execution of a loop: rows that are stored, and fetched in the other order.
class Execution {
 public:
  explicit Execution(unsigned seed) : random_(seed) {}

  void Run() {
    const int64_t kept = Draw(0, 3), stacked = Draw(1, 6);
    std::vector<int64_t> sizes(Draw(1, 3));
    for (int64_t& size : sizes) size = Draw(1, 3000);
    const Layout layout(stacked, kept, Draw(1, 3), sizes);
    Bytes stack(stacked * layout.row_bytes), rows(kept * layout.row_bytes), slots(layout.slots * layout.row_bytes);
    const Memory memory{stack.data(), slots.data(), rows.data()};
    if (Draw(0, 3) == 0) {  // an error ended this pass
      Store(layout, memory, Draw(0, layout.rows() - 1));
      if (Draw(0, 1) == 0) GiveAway({&stack, &slots});
    }
    Store(layout, memory, layout.rows());
    Bytes arrived(layout.slots * layout.row_bytes);
    const Memory back{stack.data(), arrived.data(), rows.data()};
    if (Draw(0, 3) == 0) {
      Fetch(layout, back, Draw(0, layout.rows() - 1));
      if (Draw(0, 1) == 0) GiveAway({&arrived});
    }
    Fetch(layout, back, layout.rows());
    Must(Passes::All().Find(arrived.data())->complete(), "a pass that has fetched all rows is not complete");
    Forget(slots.data());
    Forget(arrived.data());
  }

 private:
  int64_t Draw(int64_t least, int64_t most) { return least + static_cast<int64_t>(random_() % (most - least + 1)); }

  void Store(const Layout& layout, const Memory& memory, int64_t rows) {
    Must(Passes::All().Begin(executor_, Direction::kStore, layout, memory));
    stored_.assign(layout.rows(), std::vector<Bytes>(layout.sizes.size()));
    const std::shared_ptr<Pass> pass = Passes::All().Find(memory.slots);
    for (int64_t row = 0; row < rows; ++row) {
      for (size_t piece = 0; piece < layout.sizes.size(); ++piece) {
        Bytes x(layout.sizes[piece]);
        for (char& byte : x) byte = static_cast<char>(random_());
        stored_[row][piece] = x;
        Must(pass->Store(executor_, memory, static_cast<int64_t>(piece), x.data(), layout.sizes[piece]));
        std::memset(x.data(), 0, x.size());
      }
    }
    bool ended = false;
    for (const char* const written : {memory.stack, memory.kept}) {
      const bool ends = pass->EndStore(executor_, written, ended).ok();
      Must(ends == (rows == layout.rows()), "a pass ends when its rows are stored, not before");
    }
    Must(ended == (rows == layout.rows()), "a pass ends with its stack and the rows that stay");
    Must(!pass->Fetch(executor_, memory, 0, stored_[0][0].data(), layout.sizes[0]).ok(), "a pass that stores fetches");
  }

  void Fetch(const Layout& layout, const Memory& memory, int64_t rows) {
    Must(Passes::All().Begin(executor_, Direction::kFetch, layout, memory));
    const std::shared_ptr<Pass> pass = Passes::All().Find(memory.slots);
    for (int64_t row = layout.rows() - 1; row >= layout.rows() - rows; --row) {
      for (size_t piece = 0; piece < layout.sizes.size(); ++piece) {
        Bytes x(layout.sizes[piece]);
        Must(pass->Fetch(executor_, memory, static_cast<int64_t>(piece), x.data(), layout.sizes[piece]));
        Must(x == stored_[row][piece], "another row comes back than was stored");
      }
    }
  }

  // The memory is that of others at once.
  static void GiveAway(std::initializer_list<Bytes*> memory) {
    Settle();
    for (Bytes* const bytes : memory) std::ranges::fill(*bytes, char{1});
  }

  // Memory goes back to others once no copy is under way.
  void Forget(char* slots) {
    Must(Passes::All().Find(slots)->WaitForAll(executor_));
    Passes::All().Forget(slots);
  }

  const Executor executor_{1, nullptr};
  std::mt19937 random_;
  std::vector<std::vector<Bytes>> stored_;  // by row and piece
};

}  // namespace
}  // namespace te::offload

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  const unsigned seed = argc > 2 ? std::atoi(argv[2]) : 0;
  te::offload::Disturb(200);
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 4; ++thread) {
    threads.emplace_back([=] {
      te::offload::Execution execution(4 * seed + thread);
      for (int round = 0; round < rounds; ++round) execution.Run();
    });
  }
  for (std::thread& thread : threads) thread.join();
}
