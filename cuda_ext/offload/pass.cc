#include <algorithm>

#include "offload/offload.h"

namespace te::offload {

Layout::Layout(int64_t stacked, int64_t kept, int64_t slots, std::vector<int64_t> sizes)
    : stacked(stacked), kept(kept), slots(slots), sizes(std::move(sizes)), row_bytes(0) {
  for (const int64_t size : this->sizes) {
    offsets.push_back(row_bytes);
    row_bytes += (size + kAlignment - 1) / kAlignment * kAlignment;
  }
}

Pass::Pass(Direction direction, Layout layout)
    : direction_(direction),
      layout_(std::move(layout)),
      done_(layout_.sizes.size(), 0),
      copied_(layout_.sizes.size() * layout_.slots) {}

Copied& Pass::copied(int64_t row, int64_t piece) { return copied_[row % layout_.slots * layout_.sizes.size() + piece]; }

char* Pass::In(char* rows, int64_t row, int64_t piece) const {
  return rows + row * layout_.row_bytes + layout_.offsets[piece];
}

char* Pass::Slot(const Memory& memory, int64_t row, int64_t piece) const {
  return In(memory.slots, row % layout_.slots, piece);
}

Status Pass::Begin(const Executor& executor, const Memory& memory) {
  if (Disturbance() > 0) TE_JAX_TRY(Poison(executor, memory.slots, layout_.slots * layout_.row_bytes));
  kept_ = memory.kept;
  if (direction_ == Direction::kFetch) stack_ = memory.stack;
  return Status::Ok();
}

Status Pass::FetchFirst(const Executor& executor, const Memory& memory) {
  for (int64_t row = layout_.stacked - 1; row >= 0 && row >= layout_.stacked - layout_.slots; --row) {
    for (size_t piece = 0; piece < layout_.sizes.size(); ++piece) {
      TE_JAX_TRY(FetchAhead(executor, memory, static_cast<int64_t>(piece), row));
    }
  }
  return Status::Ok();
}

Status Pass::FetchAhead(const Executor& executor, const Memory& memory, int64_t piece, int64_t row) {
  return CopyBeside(executor, Lane::kToDevice, Slot(memory, row, piece), In(memory.stack, row, piece),
                    layout_.sizes[piece], copied(row, piece));
}

Status Pass::Next(Direction direction, const Memory& memory, int64_t piece, int64_t bytes, Place& place) {
  if (direction != direction_) {
    return Status::Failed(direction == Direction::kStore ? "these slots are of a pass that fetches"
                                                         : "these slots are of a pass that stores");
  }
  if (piece < 0 || piece >= static_cast<int64_t>(done_.size()) || bytes != layout_.sizes[piece]) {
    return Status::Failed("rows have no piece " + std::to_string(piece) + " of " + std::to_string(bytes) + " bytes");
  }
  if (stack_ == nullptr) stack_ = memory.stack;
  if (stack_ != memory.stack) return Status::Failed("the stack is another one than before in this pass");
  if (kept_ != memory.kept) return Status::Failed("the kept rows are other ones than before in this pass");
  if (done_[piece] == layout_.rows()) {
    return Status::Failed("all " + std::to_string(layout_.rows()) + " rows were " +
                          (direction == Direction::kStore ? "stored" : "fetched") + " before");
  }
  const int64_t count = done_[piece]++;
  const int64_t layer = direction == Direction::kStore ? count : layout_.rows() - 1 - count;
  const int64_t kept = layout_.KeptOf(layer);
  const bool stays = layout_.KeptOf(layer + 1) > kept;
  place = {stays, stays ? kept : layer - kept};
  return Status::Ok();
}

Status Pass::Store(const Executor& executor, const Memory& memory, int64_t piece, const void* x, int64_t bytes) {
  Place place{};
  TE_JAX_TRY(Next(Direction::kStore, memory, piece, bytes, place));
  const int64_t row = place.row;
  if (place.stays) return CopyInOrder(executor, In(memory.kept, row, piece), x, bytes);
  TE_JAX_TRY(WaitFor(executor, copied(row, piece)));
  TE_JAX_TRY(CopyInOrder(executor, Slot(memory, row, piece), x, bytes));
  return CopyBeside(executor, Lane::kToHost, In(memory.stack, row, piece), Slot(memory, row, piece), bytes,
                    copied(row, piece));
}

Status Pass::Fetch(const Executor& executor, const Memory& memory, int64_t piece, void* x, int64_t bytes) {
  Place place{};
  const bool first = std::ranges::all_of(done_, [](int64_t rows) { return rows == 0; });
  TE_JAX_TRY(Next(Direction::kFetch, memory, piece, bytes, place));
  if (first) TE_JAX_TRY(FetchFirst(executor, memory));
  const int64_t row = place.row;
  if (place.stays) return CopyInOrder(executor, x, In(memory.kept, row, piece), bytes);
  TE_JAX_TRY(WaitFor(executor, copied(row, piece)));
  TE_JAX_TRY(CopyInOrder(executor, x, Slot(memory, row, piece), bytes));
  return row >= layout_.slots ? FetchAhead(executor, memory, piece, row - layout_.slots) : Status::Ok();
}

bool Pass::complete() const {
  return std::ranges::all_of(done_, [this](int64_t rows) { return rows == layout_.rows(); });
}

Status Pass::EndStore(const Executor& executor, const char* rows, bool& ended) {
  if (direction_ != Direction::kStore) return Status::Failed("these slots are of a pass that fetches");
  if (!complete()) {
    return Status::Failed("the pass ends after " + std::to_string(std::ranges::min(done_)) + " of " +
                          std::to_string(layout_.rows()) + " rows");
  }
  if (rows != stack_ && rows != kept_) return Status::Failed("the pass ends with other rows than it has stored");
  (rows == stack_ ? stack_ended_ : kept_ended_) = true;
  ended = stack_ended_ && kept_ended_;
  return WaitForAll(executor);
}

Status Pass::WaitForAll(const Executor& executor) {
  for (Copied& copied : copied_) TE_JAX_TRY(WaitFor(executor, copied));
  return Status::Ok();
}

Passes& Passes::All() {
  static Passes* const passes = new Passes;  // never destroyed: CUDA may be gone by then
  return *passes;
}

Status Passes::Begin(const Executor& executor, Direction direction, Layout layout, const Memory& memory) {
  auto pass = std::make_shared<Pass>(direction, std::move(layout));
  std::shared_ptr<Pass> former = pass;
  {
    const std::lock_guard lock(mutex_);
    std::swap(by_slots_[memory.slots], former);
  }
  if (former != nullptr) TE_JAX_TRY(former->WaitForAll(executor));
  return pass->Begin(executor, memory);
}

std::shared_ptr<Pass> Passes::Find(const void* slots) {
  const std::lock_guard lock(mutex_);
  const auto found = by_slots_.find(slots);
  return found == by_slots_.end() ? nullptr : found->second;
}

void Passes::Forget(const void* slots) {
  const std::lock_guard lock(mutex_);
  by_slots_.erase(slots);
}

}  // namespace te::offload
