#include "common/ffi.h"

#include "quantize/decoder.h"
#include "softmax_cross_entropy/softmax_cross_entropy.h"

namespace te::softmax_cross_entropy {
namespace {

using ffi::AnyBuffer;
using Result = ffi::Result<AnyBuffer>;

// Checks and decodes the arguments that the handlers share.
Logits Decode(Rules& rules, const AnyBuffer& logits, const AnyBuffer& labels, float softcap, int64_t padding) {
  const std::optional<DType> dtype = FloatingType(logits);
  rules.That(dtype.has_value(), "logits", logits, "be float32 or bfloat16");
  rules.That(logits.dimensions().size() > 0 && logits.dimensions().back() > 0, "logits", logits,
             "have a vocabulary of at least 1 as its last dimension");
  if (rules.broken()) return {};
  const int64_t stride = logits.dimensions().back();
  const int64_t rows = CountOf(logits) / stride;
  rules.That(stride <= INT32_MAX, "logits", logits, "have a vocabulary below 2^31");
  rules.That(0 <= padding && padding < stride, "logits", logits, "have more columns than their padding");
  if (rules.broken()) return {};
  rules.Type(ffi::S32, "labels", labels).Elements(rows, "labels", labels);
  const auto* codes = static_cast<const int32_t*>(labels.untyped_data());
  return {*dtype, logits.untyped_data(), codes, rows, stride - padding, stride, softcap};
}

// A float32 value for each row.
float* PerRow(Rules& rules, std::string_view name, const AnyBuffer& buffer, const Logits& logits) {
  rules.Type(ffi::F32, name, buffer).Elements(logits.rows, name, buffer);
  return static_cast<float*>(buffer.untyped_data());
}

ffi::Error HandleStatistics(PlatformValue platform, AnyBuffer logits, AnyBuffer labels, Result lse, Result target,
                            Result total, float softcap, int64_t padding, bool with_total) {
  constexpr std::string_view kName = "te_softmax_cross_entropy_statistics";
  Rules rules(kName);
  const Logits decoded = Decode(rules, logits, labels, softcap, padding);
  const Statistics out{PerRow(rules, "lse", *lse, decoded), PerRow(rules, "target", *target, decoded),
                       PerRow(rules, "total", *total, decoded)};
  if (rules.broken()) return rules.error();
  return ToError(kName, ComputeStatistics(MakeExecutor(platform), decoded, with_total, out));
}

ffi::Error HandleGradient(PlatformValue platform, AnyBuffer logits, AnyBuffer labels, AnyBuffer lse, AnyBuffer weight,
                          Result out, float softcap, int64_t padding, float label_smoothing, float uniform,
                          float z_loss) {
  constexpr std::string_view kName = "te_softmax_cross_entropy_gradient";
  Rules rules(kName);
  const Logits decoded = Decode(rules, logits, labels, softcap, padding);
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

ffi::Error HandleBoth(PlatformValue platform, AnyBuffer logits, AnyBuffer labels, AnyBuffer weight, Result lse,
                      Result target, Result total, Result out, float softcap, int64_t padding, bool with_total,
                      float label_smoothing, float uniform, float z_loss) {
  constexpr std::string_view kName = "te_softmax_cross_entropy_both";
  Rules rules(kName);
  const Logits decoded = Decode(rules, logits, labels, softcap, padding);
  const Statistics statistics{PerRow(rules, "lse", *lse, decoded), PerRow(rules, "target", *target, decoded),
                              PerRow(rules, "total", *total, decoded)};
  const Gradient gradient{
      statistics.lse, PerRow(rules, "weight", weight, decoded), label_smoothing, uniform, z_loss, out->untyped_data()};
  rules.Type(logits.element_type(), "gradient", *out).Elements(CountOf(logits), "gradient", *out);
  if (rules.broken()) return rules.error();
  return ToError(kName, ComputeBoth(MakeExecutor(platform), decoded, with_total, statistics, gradient));
}

ffi::Error HandleQuantized(PlatformValue platform, AnyBuffer logits, AnyBuffer labels, AnyBuffer lse, AnyBuffer weight,
                           Result data, Result scale_inv, Result transposed, Result transposed_scale_inv,
                           int64_t row_ndim, int64_t batch_ndim, float softcap, int64_t padding, float label_smoothing,
                           float uniform, float z_loss, bool data_128x128, bool transposed_128x128,
                           bool power_of_two_scales) {
  constexpr std::string_view kName = "te_softmax_cross_entropy_gradient_blocks";
  quantize::Decoder decoder(kName, logits, row_ndim, batch_ndim, "logits");
  const quantize::Copies copies = decoder.CopiesTo(*data, *transposed, nullptr, power_of_two_scales);
  const quantize::BlockScaling scaling =
      decoder.BlockScalingOf(copies, *scale_inv, *transposed_scale_inv, data_128x128, transposed_128x128);
  Rules& rules = decoder.rules();
  const Logits decoded = Decode(rules, logits, labels, softcap, padding);
  const Gradient gradient{PerRow(rules, "lse", lse, decoded),
                          PerRow(rules, "weight", weight, decoded),
                          label_smoothing,
                          uniform,
                          z_loss,
                          nullptr};
  return decoder.Run(platform, {}, [&](const Executor& executor, const quantize::Matrices& x) {
    if (x.count != 1) return Status::Failed("a batch of matrices is not supported");
    return QuantizeGradient(executor, decoded, gradient, copies, scaling);
  });
}

}  // namespace

// logits, labels -> lse, target, total
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    te_softmax_cross_entropy_statistics, HandleStatistics,
    (Buffers<2, 3>().Attr<float>("softcap").Attr<int64_t>("padding").Attr<bool>("with_total")),
    {ffi::Traits::kCmdBufferCompatible});

// logits, labels, lse, weight -> gradient
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_softmax_cross_entropy_gradient, HandleGradient,
                              (Buffers<4, 1>()
                                   .Attr<float>("softcap")
                                   .Attr<int64_t>("padding")
                                   .Attr<float>("label_smoothing")
                                   .Attr<float>("uniform")
                                   .Attr<float>("z_loss")),
                              {ffi::Traits::kCmdBufferCompatible});

// logits, labels, weight -> lse, target, total, gradient
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_softmax_cross_entropy_both, HandleBoth,
                              (Buffers<3, 4>()
                                   .Attr<float>("softcap")
                                   .Attr<int64_t>("padding")
                                   .Attr<bool>("with_total")
                                   .Attr<float>("label_smoothing")
                                   .Attr<float>("uniform")
                                   .Attr<float>("z_loss")),
                              {ffi::Traits::kCmdBufferCompatible});

// logits, labels, lse, weight -> data, scale_inv, transposed, transposed_scale_inv
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_softmax_cross_entropy_gradient_blocks, HandleQuantized,
                              (Buffers<4, 4>()
                                   .Attr<int64_t>("row_ndim")
                                   .Attr<int64_t>("batch_ndim")
                                   .Attr<float>("softcap")
                                   .Attr<int64_t>("padding")
                                   .Attr<float>("label_smoothing")
                                   .Attr<float>("uniform")
                                   .Attr<float>("z_loss")
                                   .Attr<bool>("data_128x128")
                                   .Attr<bool>("transposed_128x128")
                                   .Attr<bool>("power_of_two_scales")),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te::softmax_cross_entropy
