// The parts that all FFI handlers share: their context, checks of operands, and the step from Status to ffi::Error.
// Only <op>/ffi.cc and module_*.cc include this file; kernels never see XLA.
#pragma once

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

// The beginning of a binding: the context, operands and results. XLA compares both numbers with those of each call.
template <size_t kOperands, size_t kResults, ffi::ExecutionStage kStage = ffi::ExecutionStage::kExecute>
auto Buffers() {
  if constexpr (kResults > 0) {
    return Buffers<kOperands, kResults - 1, kStage>().template Ret<ffi::AnyBuffer>();
  } else if constexpr (kOperands > 0) {
    return Buffers<kOperands - 1, 0, kStage>().template Arg<ffi::AnyBuffer>();
  } else {
    return ffi::Ffi::Bind<kStage>().template Ctx<Platform>();
  }
}

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
