#include "common/ffi.h"

#include "quantize/decoder.h"
#include "softmax_cross_entropy/softmax_cross_entropy.h"

namespace te::softmax_cross_entropy {
namespace {

using ffi::AnyBuffer;

TE_JAX_ATTRIBUTES(LogitsAttributes, float softcap; int64_t padding);
TE_JAX_ATTRIBUTES(StatisticsAttributes, LogitsAttributes logits; bool with_total);
TE_JAX_ATTRIBUTES(GradientAttributes, LogitsAttributes logits; float label_smoothing, uniform, z_loss);
TE_JAX_ATTRIBUTES(BothAttributes, GradientAttributes gradient; bool with_total);
TE_JAX_ATTRIBUTES(QuantizedAttributes, GradientAttributes gradient; int64_t row_ndim, batch_ndim;
                  quantize::BlockAttributes blocks);

TE_JAX_CALL(StatisticsCall, (logits, labels), (lse, target, total));
TE_JAX_CALL(GradientCall, (logits, labels, lse, weight), (gradient));
TE_JAX_CALL(BothCall, (logits, labels, weight), (lse, target, total, gradient));
TE_JAX_CALL(QuantizedCall, (logits, labels, lse, weight), (data, scale_inv, transposed, transposed_scale_inv));

// Checks and decodes the arguments that the handlers share.
Logits Decode(Rules& rules, const AnyBuffer& logits, const AnyBuffer& labels, const LogitsAttributes& attributes) {
  const std::optional<DType> dtype = FloatingType(logits);
  rules.That(dtype.has_value(), "logits", logits, "be float32 or bfloat16");
  rules.That(logits.dimensions().size() > 0 && logits.dimensions().back() > 0, "logits", logits,
             "have a vocabulary of at least 1 as its last dimension");
  if (rules.broken()) return {};
  const int64_t stride = logits.dimensions().back(), padding = attributes.padding;
  const int64_t rows = CountOf(logits) / stride;
  rules.That(stride <= INT32_MAX, "logits", logits, "have a vocabulary below 2^31");
  rules.That(0 <= padding && padding < stride, "logits", logits, "have more columns than their padding");
  if (rules.broken()) return {};
  rules.Type(ffi::S32, "labels", labels).Elements(rows, "labels", labels);
  const auto* codes = static_cast<const int32_t*>(labels.untyped_data());
  return {*dtype, logits.untyped_data(), codes, rows, stride - padding, stride, attributes.softcap};
}

// A float32 value for each row.
float* PerRow(Rules& rules, std::string_view name, const AnyBuffer& buffer, const Logits& logits) {
  rules.Type(ffi::F32, name, buffer).Elements(logits.rows, name, buffer);
  return static_cast<float*>(buffer.untyped_data());
}

Statistics StatisticsOf(Rules& rules, const AnyBuffer& lse, const AnyBuffer& target, const AnyBuffer& total,
                        const Logits& logits) {
  return {PerRow(rules, "lse", lse, logits), PerRow(rules, "target", target, logits),
          PerRow(rules, "total", total, logits)};
}

// A gradient that is written to `out`.
Gradient GradientOf(Rules& rules, const AnyBuffer& lse, const AnyBuffer& weight, const GradientAttributes& attributes,
                    const Logits& logits, void* out) {
  return {PerRow(rules, "lse", lse, logits),
          PerRow(rules, "weight", weight, logits),
          attributes.label_smoothing,
          attributes.uniform,
          attributes.z_loss,
          out};
}

ffi::Error HandleStatistics(PlatformValue platform, const StatisticsCall& call,
                            const StatisticsAttributes& attributes) {
  constexpr std::string_view kName = "te_softmax_cross_entropy_statistics";
  Rules rules(kName);
  const Logits logits = Decode(rules, call.logits, call.labels, attributes.logits);
  const Statistics statistics = StatisticsOf(rules, call.lse, call.target, call.total, logits);
  if (rules.broken()) return rules.error();
  return ToError(kName, ComputeStatistics(MakeExecutor(platform), logits, attributes.with_total, statistics));
}

ffi::Error HandleGradient(PlatformValue platform, const GradientCall& call, const GradientAttributes& attributes) {
  constexpr std::string_view kName = "te_softmax_cross_entropy_gradient";
  Rules rules(kName);
  const Logits logits = Decode(rules, call.logits, call.labels, attributes.logits);
  void* const out = call.gradient.untyped_data();
  const Gradient gradient = GradientOf(rules, call.lse, call.weight, attributes, logits, out);
  rules.Type(call.logits.element_type(), "gradient", call.gradient)
      .Elements(CountOf(call.logits), "gradient", call.gradient);
  if (rules.broken()) return rules.error();
  return ToError(kName, ComputeGradient(MakeExecutor(platform), logits, gradient));
}

ffi::Error HandleBoth(PlatformValue platform, const BothCall& call, const BothAttributes& attributes) {
  constexpr std::string_view kName = "te_softmax_cross_entropy_both";
  Rules rules(kName);
  const Logits logits = Decode(rules, call.logits, call.labels, attributes.gradient.logits);
  const Statistics statistics = StatisticsOf(rules, call.lse, call.target, call.total, logits);
  void* const out = call.gradient.untyped_data();
  const Gradient gradient = GradientOf(rules, call.lse, call.weight, attributes.gradient, logits, out);
  rules.Type(call.logits.element_type(), "gradient", call.gradient)
      .Elements(CountOf(call.logits), "gradient", call.gradient);
  if (rules.broken()) return rules.error();
  return ToError(kName, ComputeBoth(MakeExecutor(platform), logits, attributes.with_total, statistics, gradient));
}

ffi::Error HandleQuantized(PlatformValue platform, const QuantizedCall& call, const QuantizedAttributes& attributes) {
  constexpr std::string_view kName = "te_softmax_cross_entropy_gradient_blocks";
  quantize::Decoder decoder(kName, call.logits, attributes.row_ndim, attributes.batch_ndim, "logits");
  const quantize::Copies copies = decoder.CopiesOf(call, attributes.blocks.power_of_two_scales);
  const quantize::BlockScaling scaling = decoder.BlockScalingOf(copies, call, attributes.blocks);
  Rules& rules = decoder.rules();
  const Logits logits = Decode(rules, call.logits, call.labels, attributes.gradient.logits);
  const Gradient gradient = GradientOf(rules, call.lse, call.weight, attributes.gradient, logits, nullptr);
  return decoder.Run(platform, {}, [&](const Executor& executor, const quantize::Matrices& x) {
    if (x.count != 1) return Status::Failed("a batch of matrices is not supported");
    return QuantizeGradient(executor, logits, gradient, copies, scaling);
  });
}

}  // namespace

TE_JAX_DEFINE_TARGET(te_softmax_cross_entropy_statistics, HandleStatistics, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_softmax_cross_entropy_gradient, HandleGradient, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_softmax_cross_entropy_both, HandleBoth, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_softmax_cross_entropy_gradient_blocks, HandleQuantized, ffi::Traits::kCmdBufferCompatible)

}  // namespace te::softmax_cross_entropy
