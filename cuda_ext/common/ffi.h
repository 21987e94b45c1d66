// The parts that all FFI handlers share: their context, checks of operands, and the step from Status to ffi::Error.
// Only <op>/ffi.cc and module_*.cc include this file; kernels never see XLA.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include "common/dtype.h"
#include "common/executor.h"
#include "common/fp8.h"
#include "common/status.h"
#include "xla/ffi/api/ffi.h"

namespace te {

namespace ffi = ::xla::ffi;

// Every handler binds this context first; it is the only place where the platforms differ.
#ifdef TE_JAX_CUDA
using Platform = ffi::PlatformStream<cudaStream_t>;
inline Executor MakeExecutor(cudaStream_t stream) { return Executor{stream}; }
#else
using Platform = ffi::ThreadPool;
inline Executor MakeExecutor(ffi::ThreadPool pool) {
  return Executor(pool.num_threads(), [pool](std::function<void()> task) mutable { pool.Schedule(std::move(task)); });
}
#endif

using PlatformValue = ffi::CtxDecoding<Platform>::Type;

// A struct of the operands and results of a target, in the order of its calls: TE_JAX_CALL(Call, (x, y), (z)). No other
// place states it: the binding takes it from here, and native.call the names.
#define TE_JAX_CALL(Call, operands, results)                    \
  struct Call {                                                 \
    ::xla::ffi::AnyBuffer TE_JAX_LIST operands;                 \
    ::xla::ffi::AnyBuffer TE_JAX_LIST results;                  \
    static constexpr char kNames[] = #operands " -> " #results; \
  }
#define TE_JAX_LIST(...) __VA_ARGS__

// A struct of attributes, TE_JAX_ATTRIBUTES(Attributes, float alpha, limit; bool gelu), which handlers read by the
// names of its members. The attributes of a member that is such a struct lie beside the others.
#define TE_JAX_ATTRIBUTES(Attributes, ...)               \
  struct Attributes {                                    \
    __VA_ARGS__;                                         \
    static constexpr char kMembers[] = #__VA_ARGS__ ";"; \
  }

template <typename T>
concept IsAttributes = requires { T::kMembers; };

class AttributeReader {
 public:
  AttributeReader(const XLA_FFI_Attrs* attributes, ffi::DiagnosticEngine& diagnostic)
      : attributes_(attributes), diagnostic_(diagnostic) {}

  template <typename T>
  std::optional<T> Read() {
    const T value = Members<T>(std::make_index_sequence<NamesOf<T>().size()>{});
    if (found_ && read_ != attributes_->size) {
      diagnostic_.Emit("Wrong number of attributes: expected ") << read_ << " but got " << attributes_->size;
    }
    return found_ && read_ == attributes_->size ? std::optional(value) : std::nullopt;
  }

 private:
  // Becomes what the member is that it initializes.
  struct Member {
    AttributeReader& reader;
    std::string_view name;

    template <typename T>
    operator T() const {
      if constexpr (IsAttributes<T>) {
        return reader.Members<T>(std::make_index_sequence<NamesOf<T>().size()>{});
      } else {
        ++reader.read_;
        const ffi::ErrorOr<T> value = ffi::Dictionary(reader.attributes_).get<T>(name);
        if (value.has_value()) return *value;
        reader.diagnostic_.Emit(value.error().message());
        reader.found_ = false;
        return T{};
      }
    }
  };

  // Names stand before commas and semicolons.
  template <typename T>
  static constexpr auto NamesOf() {
    constexpr std::string_view kText = T::kMembers, kEnds = ",;";
    std::array<std::string_view, std::ranges::count_if(kText, [](char c) { return c == ',' || c == ';'; })> names;
    size_t end = 0;
    for (std::string_view& name : names) {
      end = kText.find_first_of(kEnds, end);
      const size_t begin = kText.find_last_of(" ", end) + 1;
      name = kText.substr(begin, end++ - begin);
    }
    return names;
  }

  template <typename T, size_t... kIndices>
  T Members(std::index_sequence<kIndices...>) {
    constexpr auto kNames = NamesOf<T>();
    return T{Member{*this, kNames[kIndices]}...};
  }

  const XLA_FFI_Attrs* attributes_;
  ffi::DiagnosticEngine& diagnostic_;
  int64_t read_ = 0;
  bool found_ = true;
};

// What the function of a handler says of its binding: it takes the platform, a struct of buffers, and one of attributes
// where there are any.
template <auto kFunction>
struct HandlerOf;

template <typename Call, typename... Attributes,
          ffi::Error (*kFunction)(PlatformValue, const Call&, const Attributes&...)>
struct HandlerOf<kFunction> {
  static_assert(sizeof...(Attributes) <= 1);
  static constexpr const char* kNames = Call::kNames;

  static constexpr size_t Count(std::string_view names) { return 1 + std::ranges::count(names, ','); }
  static constexpr size_t kArrow = std::string_view(Call::kNames).find("->");
  static constexpr size_t kOperands = Count(std::string_view(Call::kNames).substr(0, kArrow));
  static constexpr size_t kResults = Count(std::string_view(Call::kNames).substr(kArrow));

  ffi::Error operator()(PlatformValue platform, Attributes... attributes, auto... buffers) const {
    return kFunction(platform, Call{BufferOf(buffers)...}, attributes...);
  }

  // XLA compares both numbers with those of each call.
  template <ffi::ExecutionStage kStage = ffi::ExecutionStage::kExecute, size_t kArgs = kOperands,
            size_t kRets = kResults>
  static auto Binding() {
    if constexpr (kRets > 0) {
      return Binding<kStage, kArgs, kRets - 1>().template Ret<ffi::AnyBuffer>();
    } else if constexpr (kArgs > 0) {
      return Binding<kStage, kArgs - 1, 0>().template Arg<ffi::AnyBuffer>();
    } else if constexpr (sizeof...(Attributes) > 0) {
      return ffi::Ffi::Bind<kStage>().template Ctx<Platform>().template Attrs<Attributes...>();
    } else {
      return ffi::Ffi::Bind<kStage>().template Ctx<Platform>();
    }
  }

 private:
  static ffi::AnyBuffer BufferOf(ffi::AnyBuffer operand) { return operand; }
  static ffi::AnyBuffer BufferOf(ffi::Result<ffi::AnyBuffer> result) { return *result; }
};

// Defines a target by its function; traits follow.
#define TE_JAX_DEFINE_TARGET(target, Function, ...)                                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(target, HandlerOf<Function>{}, HandlerOf<Function>::Binding(), {__VA_ARGS__}); \
  extern "C" const char* target##_names() { return HandlerOf<Function>::kNames; }

// The product of counts, none negative, or INT64_MAX, which no array has, where 64 bits do not hold it. Beside an
// extent of zero the others can be of any size: products of some of them, and of several arrays', must not wrap.
template <typename Counts = std::initializer_list<int64_t>>
int64_t CountOf(const Counts& counts) {
  int64_t product = 1;
  for (const int64_t count : counts) {
    if (__builtin_mul_overflow(product, count, &product)) product = INT64_MAX;
  }
  return product;
}

using Sizes = std::span<const int64_t>;

inline Sizes SizesOf(const ffi::AnyBuffer& buffer) { return {buffer.dimensions().begin(), buffer.dimensions().size()}; }
inline int64_t CountOf(const ffi::AnyBuffer& buffer) { return CountOf(SizesOf(buffer)); }

// The number of dimensions that a buffer has beside groups of so many each; nothing where a group has a negative number
// or the buffer too few.
inline std::optional<int64_t> DimensionsBeside(std::initializer_list<int64_t> groups, const ffi::AnyBuffer& buffer) {
  auto left = static_cast<int64_t>(buffer.dimensions().size());
  for (const int64_t count : groups) {
    if (count < 0 || count > left) return std::nullopt;
    left -= count;
  }
  return left;
}

inline std::string Describe(const ffi::AnyBuffer& buffer) {
  std::ostringstream text;
  text << buffer.element_type() << "[";
  for (size_t i = 0; i < buffer.dimensions().size(); ++i) text << (i ? "," : "") << buffer.dimensions()[i];
  text << "]";
  return text.str();
}

// Checks operands and remembers the first broken rule: a handler reads as the list of its rules. XLA's own accessors
// check with assert(), which release builds drop.
class Rules {
 public:
  explicit Rules(std::string_view operation) : operation_(operation) {}

  // The names of the checks that follow start with this, for operands and results that come in groups.
  Rules& Of(std::string_view group) {
    group_ = group;
    return *this;
  }

  Rules& That(bool holds, std::string_view name, const ffi::AnyBuffer& buffer, std::string_view rule) {
    if (holds || broken_) return *this;
    std::ostringstream text;
    text << operation_ << ": " << group_ << name << " is " << Describe(buffer) << "; it must " << rule;
    broken_ = text.str();
    return *this;
  }

  Rules& Type(ffi::DataType type, std::string_view name, const ffi::AnyBuffer& buffer) {
    if (buffer.element_type() == type) return *this;  // before any text is made: handlers are on the hot path
    std::ostringstream rule;
    rule << "be of type " << type;
    return That(false, name, buffer, rule.str());
  }

  Rules& Elements(int64_t count, std::string_view name, const ffi::AnyBuffer& buffer) {
    if (CountOf(buffer) == count) return *this;
    return That(
        false, name, buffer,
        count == INT64_MAX ? "have more elements than arrays can have" : "have " + std::to_string(count) + " elements");
  }

  bool broken() const { return broken_.has_value(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(*broken_); }

 private:
  std::string_view operation_;
  std::string_view group_;
  std::optional<std::string> broken_;
};

inline std::optional<DType> FloatingType(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::F32:
      return DType::kFloat32;
    case ffi::BF16:
      return DType::kBFloat16;
    default:
      return std::nullopt;
  }
}

inline std::optional<Fp8> Fp8Type(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::F8E4M3FN:
      return Fp8::kE4M3;
    case ffi::F8E5M2:
      return Fp8::kE5M2;
    default:
      return std::nullopt;
  }
}

inline ffi::Error ToError(std::string_view operation, const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(operation) + ": " + status.reason());
}

}  // namespace te

template <te::IsAttributes T>
struct xla::ffi::AttrDecoding<T> {
  using Type = T;
  static std::optional<T> Decode(XLA_FFI_AttrType, void* attributes, DiagnosticEngine& diagnostic) {
    return te::AttributeReader(static_cast<const XLA_FFI_Attrs*>(attributes), diagnostic).Read<T>();
  }
};
