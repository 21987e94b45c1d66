#include "common/ffi.h"
#include "softmax_cross_entropy/softmax_cross_entropy.h"

namespace te::softmax_cross_entropy {
namespace {

constexpr std::string_view kName = "te_softmax_cross_entropy";

ffi::Error Handle(PlatformValue platform, ffi::AnyBuffer logits, ffi::AnyBuffer labels,
                  ffi::Result<ffi::AnyBuffer> lse, ffi::Result<ffi::AnyBuffer> target,
                  ffi::Result<ffi::AnyBuffer> total, float softcap, bool with_total) {
  const std::optional<DType> dtype = FloatingType(logits);
  Rules rules(kName);
  rules.That(dtype.has_value(), "logits", logits, "be float32, bfloat16 or float16");
  rules.That(logits.dimensions().size() > 0 && logits.dimensions().back() > 0, "logits", logits,
             "have a vocabulary of at least 1 as its last dimension");
  if (rules.broken()) return rules.error();

  const int64_t vocab = logits.dimensions().back();
  const int64_t rows = static_cast<int64_t>(logits.element_count()) / vocab;
  rules.Type(ffi::S32, "labels", labels).Elements(rows, "labels", labels);
  rules.Type(ffi::F32, "lse", *lse).Elements(rows, "lse", *lse);
  rules.Type(ffi::F32, "target", *target).Elements(rows, "target", *target);
  rules.Type(ffi::F32, "total", *total).Elements(rows, "total", *total);
  rules.That(vocab <= INT32_MAX, "logits", logits, "have a vocabulary below 2^31");
  if (rules.broken()) return rules.error();

  const Statistics out{static_cast<float*>(lse->untyped_data()), static_cast<float*>(target->untyped_data()),
                       static_cast<float*>(total->untyped_data())};
  return ToError(kName, Compute(MakeExecutor(platform), *dtype, logits.untyped_data(),
                                static_cast<const int32_t*>(labels.untyped_data()), rows, vocab, softcap, with_total,
                                out));
}

}  // namespace
}  // namespace te::softmax_cross_entropy

XLA_FFI_DEFINE_HANDLER_SYMBOL(te_softmax_cross_entropy, te::softmax_cross_entropy::Handle,
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
