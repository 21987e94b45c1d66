#include "common/ffi.h"

#include <algorithm>

#include "offload/offload.h"

namespace te::offload {
namespace {

using ffi::AnyBuffer;

TE_JAX_ATTRIBUTES(BeginAttributes, int64_t stacked; ffi::Span<const int64_t> sizes);
TE_JAX_ATTRIBUTES(PieceAttributes, int64_t piece);

// Slots are [slots, row_bytes], kept rows [kept, row_bytes], and a stack [stacked, row_bytes]. Tokens order calls, and
// nobody reads them.
TE_JAX_CALL(BeginStoreCall, (token), (token_out, slots, kept, stack));
// It writes stack, slots and kept.
TE_JAX_CALL(StoreCall, (x, token, stack, slots, kept), (token_out));
TE_JAX_CALL(BeginFetchCall, (token, stack, kept), (token_out, slots));
// It writes slots.
TE_JAX_CALL(FetchCall, (token, stack, slots, kept), (token_out, x));
// The result is in the memory of rows: called for stack and kept, each of which is written then.
TE_JAX_CALL(EndStoreCall, (rows, token, slots), (written));

char* BytesOf(const AnyBuffer& buffer) { return static_cast<char*>(buffer.untyped_data()); }

// What the attributes and the slots, u8 [slots, row_bytes], say of the rows.
std::optional<Layout> DecodeLayout(Rules& rules, const AnyBuffer& slots, int64_t stacked, int64_t kept,
                                   ffi::Span<const int64_t> sizes) {
  rules.That(stacked >= 1 && kept >= 0, "slots", slots, "come with a number of rows of 1 or more in the stack");
  // As many bytes as no memory has: sums of a few stay below 2^63.
  const auto fits = [](int64_t size) { return size > 0 && size < int64_t{1} << 48; };
  rules.That(sizes.size() > 0 && sizes.size() < 4096 && std::ranges::all_of(sizes, fits), "slots", slots,
             "come with pieces of 1 byte or more");
  rules.Type(ffi::U8, "slots", slots);
  rules.That(slots.dimensions().size() == 2 && slots.dimensions()[0] >= 1, "slots", slots, "be one row or more");
  if (rules.broken()) return std::nullopt;
  Layout layout(stacked, kept, slots.dimensions()[0], {sizes.begin(), sizes.end()});
  rules.That(slots.dimensions()[1] == layout.row_bytes, "slots", slots,
             "have rows of " + std::to_string(layout.row_bytes) + " bytes");
  return rules.broken() ? std::nullopt : std::optional(layout);
}

void IsRows(Rules& rules, std::string_view name, const AnyBuffer& buffer, int64_t rows, int64_t row_bytes) {
  rules.Type(ffi::U8, name, buffer).Elements(CountOf({rows, row_bytes}), name, buffer);
}

// XLA has placed the stack of a GPU in host memory: only a CPU's is from
// here.
ffi::Error BeginStore(PlatformValue platform, const BeginStoreCall& call, const BeginAttributes& attributes) {
  constexpr std::string_view kName = "te_offload_begin_store";
  Rules rules(kName);
  const int64_t count = call.kept.dimensions().size() == 2 ? call.kept.dimensions()[0] : -1;
  std::optional<Layout> layout = DecodeLayout(rules, call.slots, attributes.stacked, count, attributes.sizes);
  if (layout) IsRows(rules, "kept", call.kept, count, layout->row_bytes);
  if (layout && CountOf(call.stack) > 0) IsRows(rules, "stack", call.stack, attributes.stacked, layout->row_bytes);
  if (rules.broken()) return rules.error();
  const Memory memory{nullptr, BytesOf(call.slots), BytesOf(call.kept)};
  return ToError(kName, Passes::All().Begin(MakeExecutor(platform), Direction::kStore, std::move(*layout), memory));
}

ffi::Error BeginFetch(PlatformValue platform, const BeginFetchCall& call, const BeginAttributes& attributes) {
  constexpr std::string_view kName = "te_offload_begin_fetch";
  Rules rules(kName);
  const int64_t count = call.kept.dimensions().size() == 2 ? call.kept.dimensions()[0] : -1;
  std::optional<Layout> layout = DecodeLayout(rules, call.slots, attributes.stacked, count, attributes.sizes);
  if (layout) IsRows(rules, "kept", call.kept, count, layout->row_bytes);
  if (layout) IsRows(rules, "stack", call.stack, attributes.stacked, layout->row_bytes);
  if (rules.broken()) return rules.error();
  const Memory memory{BytesOf(call.stack), BytesOf(call.slots), BytesOf(call.kept)};
  return ToError(kName, Passes::All().Begin(MakeExecutor(platform), Direction::kFetch, std::move(*layout), memory));
}

ffi::Error NotBegun(std::string_view name) {
  return ToError(name, Status::Failed("no pass was begun with these slots"));
}

// The pass of these slots does step(pass, memory), where all memory is as large as the pass needs it.
template <typename Step>
ffi::Error In(std::string_view name, const AnyBuffer& slots, const AnyBuffer& stack, const AnyBuffer& kept,
              const Step& step) {
  const std::shared_ptr<Pass> pass = Passes::All().Find(slots.untyped_data());
  if (pass == nullptr) return NotBegun(name);
  const Layout& layout = pass->layout();
  Rules rules(name);
  IsRows(rules, "stack", stack, layout.stacked, layout.row_bytes);
  IsRows(rules, "slots", slots, layout.slots, layout.row_bytes);
  IsRows(rules, "kept", kept, layout.kept, layout.row_bytes);
  if (rules.broken()) return rules.error();
  return ToError(name, step(*pass, Memory{BytesOf(stack), BytesOf(slots), BytesOf(kept)}));
}

ffi::Error Store(PlatformValue platform, const StoreCall& call, const PieceAttributes& attributes) {
  return In("te_offload_store", call.slots, call.stack, call.kept, [&](Pass& pass, const Memory& memory) {
    const auto bytes = static_cast<int64_t>(call.x.size_bytes());
    return pass.Store(MakeExecutor(platform), memory, attributes.piece, call.x.untyped_data(), bytes);
  });
}

ffi::Error EndStore(PlatformValue platform, const EndStoreCall& call) {
  constexpr std::string_view kName = "te_offload_end_store";
  Rules rules(kName);
  rules.That(call.written.untyped_data() == call.rows.untyped_data(), "rows", call.rows,
             "share memory with the result");
  if (rules.broken()) return rules.error();
  const std::shared_ptr<Pass> pass = Passes::All().Find(call.slots.untyped_data());
  if (pass == nullptr) return NotBegun(kName);
  bool ended = false;
  const Status status = pass->EndStore(MakeExecutor(platform), BytesOf(call.rows), ended);
  if (ended || !status.ok()) Passes::All().Forget(call.slots.untyped_data());
  return ToError(kName, status);
}

ffi::Error Fetch(PlatformValue platform, const FetchCall& call, const PieceAttributes& attributes) {
  return In("te_offload_fetch", call.slots, call.stack, call.kept, [&](Pass& pass, const Memory& memory) {
    const auto bytes = static_cast<int64_t>(call.x.size_bytes());
    TE_JAX_TRY(pass.Fetch(MakeExecutor(platform), memory, attributes.piece, call.x.untyped_data(), bytes));
    if (pass.complete()) Passes::All().Forget(call.slots.untyped_data());
    return Status::Ok();
  });
}

}  // namespace

// None is for command buffers: a captured graph would keep the lanes' events of its first run.
TE_JAX_DEFINE_TARGET(te_offload_begin_store, BeginStore)
TE_JAX_DEFINE_TARGET(te_offload_store, Store)
TE_JAX_DEFINE_TARGET(te_offload_begin_fetch, BeginFetch)
TE_JAX_DEFINE_TARGET(te_offload_fetch, Fetch)
TE_JAX_DEFINE_TARGET(te_offload_end_store, EndStore)

}  // namespace te::offload
