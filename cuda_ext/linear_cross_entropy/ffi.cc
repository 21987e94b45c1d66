#include "common/ffi.h"

#include "linear_cross_entropy/linear_cross_entropy.h"

namespace te::linear_cross_entropy {
namespace {

using ffi::AnyBuffer;
using Result = ffi::Result<AnyBuffer>;

// Absent buffers have no elements. The buffers of dkernel and dbias are those of the operands.
ffi::Error HandleLabels(PlatformValue platform, AnyBuffer columns, AnyBuffer order, AnyBuffer factor, AnyBuffer x,
                        AnyBuffer kernel, AnyBuffer dx_without, AnyBuffer dkernel, AnyBuffer dbias, Result dx,
                        Result next_dkernel, Result next_dbias, bool vocab_last) {
  constexpr std::string_view kName = "te_linear_cross_entropy_labels";
  Rules rules(kName);
  const std::optional<DType> dtype = FloatingType(x);
  rules.That(dtype.has_value() && x.dimensions().size() == 2, "x", x,
             "be float32, bfloat16 or float16 [tokens, width]");
  rules.That(kernel.dimensions().size() == 2, "kernel", kernel, "have two dimensions");
  if (rules.broken()) return rules.error();
  Labels labels{};
  labels.dtype = *dtype;
  labels.tokens = x.dimensions()[0];
  labels.width = x.dimensions()[1];
  labels.vocab = kernel.dimensions()[vocab_last ? 1 : 0];
  labels.vocab_last = vocab_last;
  rules.Type(x.element_type(), "kernel", kernel).Elements(CountOf({labels.width, labels.vocab}), "kernel", kernel);
  rules.Type(ffi::S32, "columns", columns).Elements(labels.tokens, "columns", columns);
  rules.Type(ffi::S32, "order", order).Elements(labels.tokens, "order", order);
  rules.Type(ffi::F32, "factor", factor).Elements(labels.tokens, "factor", factor);
  if (CountOf(dx_without) == 0) {
    rules.That(CountOf(*dx) == 0, "dx", *dx, "have no elements where dx_without has none");
  } else {
    rules.Type(ffi::F32, "dx_without", dx_without).Elements(CountOf(x), "dx_without", dx_without);
    rules.Type(x.element_type(), "dx", *dx).Elements(CountOf(x), "dx", *dx);
    labels.dx_without = static_cast<const float*>(dx_without.untyped_data());
    labels.dx = dx->untyped_data();
  }
  auto in_place = [&](std::string_view name, const AnyBuffer& buffer, const AnyBuffer& next, int64_t count) -> float* {
    if (CountOf(buffer) == 0) {
      rules.That(CountOf(next) == 0, name, next, "have no elements where its operand has none");
      return nullptr;
    }
    rules.Type(ffi::F32, name, buffer).Elements(count, name, buffer);
    rules.That(buffer.untyped_data() == next.untyped_data(), name, buffer, "share its buffer with the result");
    return static_cast<float*>(buffer.untyped_data());
  };
  labels.dkernel = in_place("dkernel", dkernel, *next_dkernel, CountOf(kernel));
  labels.dbias = in_place("dbias", dbias, *next_dbias, labels.vocab);
  if (rules.broken()) return rules.error();
  labels.columns = static_cast<const int32_t*>(columns.untyped_data());
  labels.order = static_cast<const int32_t*>(order.untyped_data());
  labels.factor = static_cast<const float*>(factor.untyped_data());
  labels.x = x.untyped_data();
  labels.kernel = kernel.untyped_data();
  return ToError(kName, SubtractLabels(MakeExecutor(platform), labels));
}

}  // namespace
}  // namespace te::linear_cross_entropy

XLA_FFI_DEFINE_HANDLER_SYMBOL(te_linear_cross_entropy_labels, te::linear_cross_entropy::HandleLabels,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<te::Platform>()
                                  .Arg<xla::ffi::AnyBuffer>()  // columns
                                  .Arg<xla::ffi::AnyBuffer>()  // order
                                  .Arg<xla::ffi::AnyBuffer>()  // factor
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // kernel
                                  .Arg<xla::ffi::AnyBuffer>()  // dx_without
                                  .Arg<xla::ffi::AnyBuffer>()  // dkernel
                                  .Arg<xla::ffi::AnyBuffer>()  // dbias
                                  .Ret<xla::ffi::AnyBuffer>()  // dx
                                  .Ret<xla::ffi::AnyBuffer>()  // dkernel
                                  .Ret<xla::ffi::AnyBuffer>()  // dbias
                                  .Attr<bool>("vocab_last"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
