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
using Result = ffi::Result<AnyBuffer>;

// The attributes and operands that all handlers share.
class Decoder : public quantize::Decoder {
 public:
  Decoder(std::string_view operation, const AnyBuffer& x, const AnyBuffer& gamma, float epsilon, bool centered,
          int64_t row_ndim, int64_t batch_ndim)
      : quantize::Decoder(operation, x, row_ndim, batch_ndim), batch_ndim_(batch_ndim) {
    rules().That(std::isfinite(epsilon) && epsilon >= 0, "x", x, "come with a finite epsilon of at least 0");
    inputs_.epsilon = epsilon;
    inputs_.centered = centered;
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

ffi::Error HandleNorm(PlatformValue platform, AnyBuffer x, AnyBuffer residual, AnyBuffer gamma, AnyBuffer beta,
                      AnyBuffer reference_amax, Result sum, Result mean, Result rstd, Result amax, Result data,
                      Result scale_inv, float epsilon, bool centered, int64_t row_ndim, int64_t batch_ndim,
                      bool power_of_two_scales) {
  Decoder decoder("te_norm", x, gamma, epsilon, centered, row_ndim, batch_ndim);
  decoder.Residual(residual);
  decoder.Beta(beta);
  Outputs outputs{};
  outputs.sum = const_cast<void*>(decoder.LikeX("sum", *sum, true));
  outputs.statistics = decoder.StatisticsOf(*mean, *rstd);
  quantize::RowOutputs& rows = outputs.rows;
  rows.amax = decoder.Floats("amax", *amax, 1, true);
  const Copies copies = decoder.DataTo(*data, power_of_two_scales);
  rows.format = copies.format;
  rows.power_of_two_scales = power_of_two_scales;
  rows.data = copies.data;
  rows.reference_amax = decoder.Floats("reference_amax", reference_amax, 1, true);
  const int64_t scales = rows.reference_amax ? 1 : CountOf({decoder.col_blocks(), decoder.rows()});
  rows.scale_inv = decoder.Scales("scale_inv", *scale_inv, scales, copies.data);
  return decoder.Run(
      platform, {{outputs.statistics.mean, decoder.rows()}, {outputs.statistics.rstd, decoder.rows()}, {rows.amax, 1}},
      [&](const Executor& executor, const Inputs& inputs) { return Normalize(executor, inputs, outputs); });
}

ffi::Error HandleTensor(PlatformValue platform, AnyBuffer x, AnyBuffer gamma, AnyBuffer beta, AnyBuffer mean,
                        AnyBuffer rstd, AnyBuffer amax, Result data, Result transposed, Result scale_inv,
                        Result transposed_scale_inv, Result own_amax, float epsilon, bool centered, int64_t row_ndim,
                        int64_t batch_ndim, bool power_of_two_scales) {
  Decoder decoder("te_norm_tensor", x, gamma, epsilon, centered, row_ndim, batch_ndim);
  decoder.Beta(beta);
  const Statistics statistics = decoder.StatisticsOf(mean, rstd);
  const Copies copies = decoder.CopiesTo(*data, *transposed, nullptr, power_of_two_scales);
  const TensorScaling scaling = decoder.TensorScalingOf(copies, amax, *scale_inv, *transposed_scale_inv, *own_amax);
  return decoder.Run(platform, {{scaling.own_amax, 1}}, [&](const Executor& executor, const Inputs& inputs) {
    return NormalizedInTensor(executor, inputs, statistics, copies, scaling);
  });
}

ffi::Error HandleBlocks(PlatformValue platform, AnyBuffer x, AnyBuffer gamma, AnyBuffer beta, AnyBuffer mean,
                        AnyBuffer rstd, Result data, Result scale_inv, Result transposed, Result transposed_scale_inv,
                        float epsilon, bool centered, int64_t row_ndim, int64_t batch_ndim, bool data_128x128,
                        bool transposed_128x128, bool power_of_two_scales) {
  Decoder decoder("te_norm_blocks", x, gamma, epsilon, centered, row_ndim, batch_ndim);
  decoder.Beta(beta);
  const Statistics statistics = decoder.StatisticsOf(mean, rstd);
  const Copies copies = decoder.CopiesTo(*data, *transposed, nullptr, power_of_two_scales);
  const BlockScaling scaling =
      decoder.BlockScalingOf(copies, *scale_inv, *transposed_scale_inv, data_128x128, transposed_128x128);
  // Kernels for others would serve no recipe: XLA normalizes, and te_quantize_blocks quantizes.
  decoder.rules().That((copies.transposed || CountOf(x) == 0) && !transposed_128x128, "transposed", *transposed,
                       "be there, with scales of 1x128 values");
  return decoder.Run(platform, {}, [&](const Executor& executor, const Inputs& inputs) {
    return NormalizedInBlocks(executor, inputs, statistics, copies, scaling);
  });
}

ffi::Error HandleGradient(PlatformValue platform, AnyBuffer x, AnyBuffer dy, AnyBuffer dsum, AnyBuffer gamma,
                          AnyBuffer mean, AnyBuffer rstd, Result dx, Result dgamma, Result dbeta, float epsilon,
                          bool centered, int64_t row_ndim, int64_t batch_ndim) {
  Decoder decoder("te_norm_gradient", x, gamma, epsilon, centered, row_ndim, batch_ndim);
  const Statistics statistics = decoder.StatisticsOf(mean, rstd);
  const void* of_y = decoder.LikeX("dy", dy);
  const void* of_sum = decoder.LikeX("dsum", dsum, true);
  Gradients gradients{};
  gradients.dx = const_cast<void*>(decoder.LikeX("dx", *dx));
  gradients.partials = decoder.PartialsOf(*dgamma);
  const int64_t sums = CountOf({gradients.partials, decoder.cols()});
  gradients.dgamma = decoder.Floats("dgamma_partial", *dgamma, sums);
  gradients.dbeta = decoder.Floats("dbeta_partial", *dbeta, sums, true);
  return decoder.Run(platform, {{gradients.dgamma, sums}, {gradients.dbeta, sums}},
                     [&](const Executor& executor, const Inputs& inputs) {
                       return Backward(executor, inputs, statistics, of_y, of_sum, gradients);
                     });
}

template <typename Binding>
auto WithNorm(Binding binding) {
  return std::move(binding)
      .template Attr<float>("epsilon")
      .template Attr<bool>("centered")
      .template Attr<int64_t>("row_ndim")
      .template Attr<int64_t>("batch_ndim");
}

}  // namespace

// x, residual, gamma, beta, reference_amax -> sum, mean, rstd, amax, data, scale_inv
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_norm, HandleNorm, WithNorm(Buffers<5, 6>()).Attr<bool>("power_of_two_scales"),
                              {ffi::Traits::kCmdBufferCompatible});

// x, gamma, beta, mean, rstd, amax -> data, transposed, scale_inv, transposed_scale_inv, amax_out
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_norm_tensor, HandleTensor, WithNorm(Buffers<6, 5>()).Attr<bool>("power_of_two_scales"),
                              {ffi::Traits::kCmdBufferCompatible});

// x, gamma, beta, mean, rstd -> data, scale_inv, transposed, transposed_scale_inv
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_norm_blocks, HandleBlocks,
                              WithNorm(Buffers<5, 4>())
                                  .Attr<bool>("data_128x128")
                                  .Attr<bool>("transposed_128x128")
                                  .Attr<bool>("power_of_two_scales"),
                              {ffi::Traits::kCmdBufferCompatible});

// x, dy, dsum, gamma, mean, rstd -> dx, dgamma_partial, dbeta_partial
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_norm_gradient, HandleGradient, WithNorm(Buffers<6, 3>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te::norm
