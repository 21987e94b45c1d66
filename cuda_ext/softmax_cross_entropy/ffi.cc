#include "common/ffi.h"

#include "softmax_cross_entropy/softmax_cross_entropy.h"

namespace te::softmax_cross_entropy {
namespace {

using ffi::AnyBuffer;
using Result = ffi::Result<AnyBuffer>;

// Checks and decodes the arguments that both handlers share.
Logits Decode(Rules& rules, const AnyBuffer& logits, const AnyBuffer& labels, float softcap) {
  const std::optional<DType> dtype = FloatingType(logits);
  rules.That(dtype.has_value(), "logits", logits, "be float32, bfloat16 or float16");
  rules.That(logits.dimensions().size() > 0 && logits.dimensions().back() > 0, "logits", logits,
             "have a vocabulary of at least 1 as its last dimension");
  if (rules.broken()) return {};
  const int64_t vocab = logits.dimensions().back();
  const int64_t rows = CountOf(logits) / vocab;
  rules.That(vocab <= INT32_MAX, "logits", logits, "have a vocabulary below 2^31");
  rules.Type(ffi::S32, "labels", labels).Elements(rows, "labels", labels);
  return {*dtype, logits.untyped_data(), static_cast<const int32_t*>(labels.untyped_data()), rows, vocab, softcap};
}

// A float32 value for each row.
float* PerRow(Rules& rules, std::string_view name, const AnyBuffer& buffer, const Logits& logits) {
  rules.Type(ffi::F32, name, buffer).Elements(logits.rows, name, buffer);
  return static_cast<float*>(buffer.untyped_data());
}

ffi::Error HandleStatistics(PlatformValue platform, AnyBuffer logits, AnyBuffer labels, Result lse, Result target,
                            Result total, float softcap, bool with_total) {
  constexpr std::string_view kName = "te_softmax_cross_entropy_statistics";
  Rules rules(kName);
  const Logits decoded = Decode(rules, logits, labels, softcap);
  const Statistics out{PerRow(rules, "lse", *lse, decoded), PerRow(rules, "target", *target, decoded),
                       PerRow(rules, "total", *total, decoded)};
  if (rules.broken()) return rules.error();
  return ToError(kName, ComputeStatistics(MakeExecutor(platform), decoded, with_total, out));
}

ffi::Error HandleGradient(PlatformValue platform, AnyBuffer logits, AnyBuffer labels, AnyBuffer lse, AnyBuffer weight,
                          Result out, float softcap, float label_smoothing, float uniform, float z_loss) {
  constexpr std::string_view kName = "te_softmax_cross_entropy_gradient";
  Rules rules(kName);
  const Logits decoded = Decode(rules, logits, labels, softcap);
  const Gradient gradient{PerRow(rules, "lse", lse, decoded),
                          PerRow(rules, "weight", weight, decoded),
                          label_smoothing,
                          uniform,
                          z_loss,
                          out->untyped_data()};
  rules.Type(logits.element_type(), "gradient", *out).Elements(CountOf(logits), "gradient", *out);
  if (rules.broken()) return rules.error();
  return ToError(kName, ComputeGradient(MakeExecutor(platform), decoded, gradient));
}

}  // namespace
}  // namespace te::softmax_cross_entropy

XLA_FFI_DEFINE_HANDLER_SYMBOL(te_softmax_cross_entropy_statistics, te::softmax_cross_entropy::HandleStatistics,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<te::Platform>()
                                  .Arg<xla::ffi::AnyBuffer>()  // logits
                                  .Arg<xla::ffi::AnyBuffer>()  // labels
                                  .Ret<xla::ffi::AnyBuffer>()  // lse
                                  .Ret<xla::ffi::AnyBuffer>()  // target
                                  .Ret<xla::ffi::AnyBuffer>()  // total
                                  .Attr<float>("softcap")
                                  .Attr<bool>("with_total"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(te_softmax_cross_entropy_gradient, te::softmax_cross_entropy::HandleGradient,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<te::Platform>()
                                  .Arg<xla::ffi::AnyBuffer>()  // logits
                                  .Arg<xla::ffi::AnyBuffer>()  // labels
                                  .Arg<xla::ffi::AnyBuffer>()  // lse
                                  .Arg<xla::ffi::AnyBuffer>()  // weight
                                  .Ret<xla::ffi::AnyBuffer>()  // gradient
                                  .Attr<float>("softcap")
                                  .Attr<float>("label_smoothing")
                                  .Attr<float>("uniform")
                                  .Attr<float>("z_loss"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
