#include <cmath>
#include <utility>

#include "norm/norm.h"
#include "quantize/decoder.h"

namespace te::norm {
namespace {

using ffi::AnyBuffer;
using quantize::BlockScaling;
using quantize::Copies;
using quantize::TensorScaling;

TE_JAX_ATTRIBUTES(Attributes, float epsilon; bool centered; int64_t row_ndim, batch_ndim);
TE_JAX_ATTRIBUTES(AttributesOfScales, Attributes norm; bool power_of_two_scales);
TE_JAX_ATTRIBUTES(AttributesOfBlocks, Attributes norm; quantize::BlockAttributes blocks);

TE_JAX_CALL(NormCall, (x, residual, gamma, beta, reference_amax), (sum, mean, rstd, amax, data, scale_inv));
TE_JAX_CALL(TensorCall, (x, gamma, beta, mean, rstd, amax),
            (data, transposed, scale_inv, transposed_scale_inv, amax_out));
TE_JAX_CALL(BlocksCall, (x, gamma, beta, mean, rstd), (data, scale_inv, transposed, transposed_scale_inv));
TE_JAX_CALL(GradientCall, (x, dy, dsum, gamma, mean, rstd), (dx, dgamma_partial, dbeta_partial));

// The attributes and operands that all handlers share.
class Decoder : public quantize::Decoder {
 public:
  Decoder(std::string_view operation, const AnyBuffer& x, const AnyBuffer& gamma, const Attributes& attributes)
      : quantize::Decoder(operation, x, attributes.row_ndim, attributes.batch_ndim),
        batch_ndim_(attributes.batch_ndim) {
    const float epsilon = attributes.epsilon;
    rules().That(std::isfinite(epsilon) && epsilon >= 0, "x", x, "come with a finite epsilon of at least 0");
    inputs_.epsilon = epsilon;
    inputs_.centered = attributes.centered;
    if (!rules().broken()) inputs_.gamma = Floats("gamma", gamma, cols());
  }

  // A null residual or beta has no elements.
  void Residual(const AnyBuffer& residual) { inputs_.residual = LikeX("residual", residual, true); }
  void Beta(const AnyBuffer& beta) { inputs_.beta = Floats("beta", beta, cols(), true); }

  // Operands or results; the mean is absent unless centered.
  Statistics StatisticsOf(const AnyBuffer& mean, const AnyBuffer& rstd) {
    rules().That(inputs_.centered || CountOf(mean) == 0, "mean", mean, "have no elements unless centered");
    return {inputs_.centered ? Floats("mean", mean, rows()) : nullptr, Floats("rstd", rstd, rows())};
  }

  // The number of partial sums.
  int64_t PartialsOf(const AnyBuffer& dgamma) {
    const std::optional<int64_t> ndim = DimensionsBeside({batch_ndim_, 1}, dgamma);
    const int64_t partials = ndim.value_or(0) > 0 ? SizesOf(dgamma)[batch_ndim_] : 0;
    rules().That(partials > 0, "dgamma_partial", dgamma, "have one partial sum at least after its batch dimensions");
    return partials;
  }

  // The same in quantize::Decoder; launch(executor, inputs).
  template <typename Launch>
  ffi::Error Run(PlatformValue platform, std::initializer_list<Amaxes> zeros, const Launch& launch) const {
    return quantize::Decoder::Run(platform, zeros, [&](const Executor& executor, const quantize::Matrices& x) {
      Inputs inputs = inputs_;
      inputs.dtype = x.dtype;
      inputs.x = x.data;
      inputs.count = x.count;
      inputs.rows = x.rows;
      inputs.cols = x.cols;
      return launch(executor, inputs);
    });
  }

 private:
  int64_t batch_ndim_;
  Inputs inputs_{};
};

ffi::Error HandleNorm(PlatformValue platform, const NormCall& call, const AttributesOfScales& attributes) {
  Decoder decoder("te_norm", call.x, call.gamma, attributes.norm);
  decoder.Residual(call.residual);
  decoder.Beta(call.beta);
  Outputs outputs{};
  outputs.sum = const_cast<void*>(decoder.LikeX("sum", call.sum, true));
  outputs.statistics = decoder.StatisticsOf(call.mean, call.rstd);
  quantize::RowOutputs& rows = outputs.rows;
  rows.amax = decoder.Floats("amax", call.amax, 1, true);
  const Copies copies = decoder.DataTo(call.data, attributes.power_of_two_scales);
  rows.format = copies.format;
  rows.power_of_two_scales = copies.power_of_two_scales;
  rows.data = copies.data;
  rows.reference_amax = decoder.Floats("reference_amax", call.reference_amax, 1, true);
  const int64_t scales = rows.reference_amax ? 1 : CountOf({decoder.col_blocks(), decoder.rows()});
  rows.scale_inv = decoder.Scales("scale_inv", call.scale_inv, scales, copies.data);
  return decoder.Run(
      platform, {{outputs.statistics.mean, decoder.rows()}, {outputs.statistics.rstd, decoder.rows()}, {rows.amax, 1}},
      [&](const Executor& executor, const Inputs& inputs) { return Normalize(executor, inputs, outputs); });
}

ffi::Error HandleTensor(PlatformValue platform, const TensorCall& call, const AttributesOfScales& attributes) {
  Decoder decoder("te_norm_tensor", call.x, call.gamma, attributes.norm);
  decoder.Beta(call.beta);
  const Statistics statistics = decoder.StatisticsOf(call.mean, call.rstd);
  const Copies copies = decoder.CopiesOf(call, attributes.power_of_two_scales);
  const TensorScaling scaling = decoder.TensorScalingOf(copies, call);
  return decoder.Run(platform, {{scaling.own_amax, 1}}, [&](const Executor& executor, const Inputs& inputs) {
    return NormalizedInTensor(executor, inputs, statistics, copies, scaling);
  });
}

ffi::Error HandleBlocks(PlatformValue platform, const BlocksCall& call, const AttributesOfBlocks& attributes) {
  Decoder decoder("te_norm_blocks", call.x, call.gamma, attributes.norm);
  decoder.Beta(call.beta);
  const Statistics statistics = decoder.StatisticsOf(call.mean, call.rstd);
  const Copies copies = decoder.CopiesOf(call, attributes.blocks.power_of_two_scales);
  const BlockScaling scaling = decoder.BlockScalingOf(copies, call, attributes.blocks);
  // Kernels for others would serve no recipe: XLA normalizes, and te_quantize_blocks quantizes.
  decoder.rules().That((copies.transposed || CountOf(call.x) == 0) && !attributes.blocks.transposed_128x128,
                       "transposed", call.transposed, "be there, with scales of 1x128 values");
  return decoder.Run(platform, {}, [&](const Executor& executor, const Inputs& inputs) {
    return NormalizedInBlocks(executor, inputs, statistics, copies, scaling);
  });
}

ffi::Error HandleGradient(PlatformValue platform, const GradientCall& call, const Attributes& attributes) {
  Decoder decoder("te_norm_gradient", call.x, call.gamma, attributes);
  const Statistics statistics = decoder.StatisticsOf(call.mean, call.rstd);
  const void* of_y = decoder.LikeX("dy", call.dy);
  const void* of_sum = decoder.LikeX("dsum", call.dsum, true);
  Gradients gradients{};
  gradients.dx = const_cast<void*>(decoder.LikeX("dx", call.dx));
  gradients.partials = decoder.PartialsOf(call.dgamma_partial);
  const int64_t sums = CountOf({gradients.partials, decoder.cols()});
  gradients.dgamma = decoder.Floats("dgamma_partial", call.dgamma_partial, sums);
  gradients.dbeta = decoder.Floats("dbeta_partial", call.dbeta_partial, sums, true);
  return decoder.Run(platform, {{gradients.dgamma, sums}, {gradients.dbeta, sums}},
                     [&](const Executor& executor, const Inputs& inputs) {
                       return Backward(executor, inputs, statistics, of_y, of_sum, gradients);
                     });
}

}  // namespace

TE_JAX_DEFINE_TARGET(te_norm, HandleNorm, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_norm_tensor, HandleTensor, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_norm_blocks, HandleBlocks, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_norm_gradient, HandleGradient, ffi::Traits::kCmdBufferCompatible)

}  // namespace te::norm
