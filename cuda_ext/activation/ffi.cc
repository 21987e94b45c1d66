#include <cmath>
#include <utility>

#include "activation/activation.h"
#include "quantize/decoder.h"

namespace te::activation {
namespace {

using ffi::AnyBuffer;
using quantize::BlockScaling;
using quantize::Copies;
using quantize::TensorScaling;
using Result = ffi::Result<AnyBuffer>;

std::optional<Kind> KindOf(std::string_view name) {
  if (name == "silu") return Kind::kSilu;
  if (name == "gelu") return Kind::kGelu;
  if (name == "relu") return Kind::kRelu;
  if (name == "squared_relu") return Kind::kSquaredRelu;
  return std::nullopt;
}

// The attributes and operands that all handlers share.
class Decoder : public quantize::Decoder {
 public:
  Decoder(std::string_view operation, const AnyBuffer& gate, const AnyBuffer& up, std::string_view kind, float alpha,
          float limit, float offset, int64_t row_ndim, int64_t batch_ndim)
      : quantize::Decoder(operation, gate, row_ndim, batch_ndim, "gate"),
        function{KindOf(kind).value_or(Kind::kSilu), alpha, limit, offset} {
    rules().That(KindOf(kind).has_value(), "gate", gate, "come with kind silu, gelu, relu or squared_relu");
    rules().That(std::isfinite(alpha) && std::isfinite(offset), "gate", gate, "come with a finite alpha and offset");
    rules().That(limit > 0, "gate", gate, "come with a limit above 0, infinite for none");
    if (!rules().broken()) up_ = LikeX("up", up, true);
  }

  bool gated() const { return up_ != nullptr; }

  // The same as in quantize::Decoder; launch(executor, inputs).
  template <typename Launch>
  ffi::Error Run(PlatformValue platform, std::initializer_list<Amaxes> amaxes, const Launch& launch) const {
    return quantize::Decoder::Run(platform, amaxes, [&](const Executor& executor, const quantize::Matrices& gate) {
      return launch(executor, Inputs{gate.dtype, gate.data, up_, gate.count, gate.rows, gate.cols, weights_});
    });
  }

  // Factors of rows; absent without elements.
  void Weights(const AnyBuffer& weights) { weights_ = Floats("weights", weights, rows(), true); }

  // What is summed for the gradient of the weights, and absent without them.
  float* WeightSums(const AnyBuffer& sums) {
    rules().That(weights_ != nullptr || CountOf(sums) == 0, "dweights_partial", sums,
                 "have no elements without weights");
    return weights_ ? Floats("dweights_partial", sums, CountOf({col_blocks(), rows()})) : nullptr;
  }

  // Results about up, which are absent where the function is not gated.
  void AbsentUnlessGated(std::initializer_list<std::pair<std::string_view, const AnyBuffer&>> results) {
    for (const auto& [name, buffer] : results) {
      rules().That(gated() || CountOf(buffer) == 0, name, buffer, "have no elements without up");
    }
  }

  const Function function;

 private:
  const void* up_ = nullptr;
  const float* weights_ = nullptr;
};

ffi::Error HandleAmax(PlatformValue platform, AnyBuffer gate, AnyBuffer up, Result amax, std::string_view kind,
                      float alpha, float limit, float offset, int64_t row_ndim, int64_t batch_ndim) {
  Decoder decoder("te_activation_amax", gate, up, kind, alpha, limit, offset, row_ndim, batch_ndim);
  float* out = decoder.Floats("amax", *amax, 1);
  return decoder.Run(platform, {{out, 1}}, [&](const Executor& executor, const Inputs& inputs) {
    return AmaxOfResult(executor, decoder.function, inputs, out);
  });
}

ffi::Error HandleTensor(PlatformValue platform, AnyBuffer gate, AnyBuffer up, AnyBuffer amax, Result data,
                        Result transposed, Result scale_inv, Result transposed_scale_inv, Result own_amax,
                        std::string_view kind, float alpha, float limit, float offset, int64_t row_ndim,
                        int64_t batch_ndim, bool power_of_two_scales) {
  Decoder decoder("te_activation_tensor", gate, up, kind, alpha, limit, offset, row_ndim, batch_ndim);
  const Copies copies = decoder.CopiesTo(*data, *transposed, nullptr, power_of_two_scales);
  const TensorScaling scaling = decoder.TensorScalingOf(copies, amax, *scale_inv, *transposed_scale_inv, *own_amax);
  return decoder.Run(platform, {{scaling.own_amax, 1}}, [&](const Executor& executor, const Inputs& inputs) {
    return ResultInTensor(executor, decoder.function, inputs, copies, scaling);
  });
}

ffi::Error HandleBlocks(PlatformValue platform, AnyBuffer gate, AnyBuffer up, AnyBuffer weights, Result data,
                        Result scale_inv, Result transposed, Result transposed_scale_inv, std::string_view kind,
                        float alpha, float limit, float offset, int64_t row_ndim, int64_t batch_ndim, bool data_128x128,
                        bool transposed_128x128, bool power_of_two_scales) {
  Decoder decoder("te_activation_blocks", gate, up, kind, alpha, limit, offset, row_ndim, batch_ndim);
  decoder.Weights(weights);
  const Copies copies = decoder.CopiesTo(*data, *transposed, nullptr, power_of_two_scales);
  const BlockScaling scaling =
      decoder.BlockScalingOf(copies, *scale_inv, *transposed_scale_inv, data_128x128, transposed_128x128);
  return decoder.Run(platform, {}, [&](const Executor& executor, const Inputs& inputs) {
    return ResultInBlocks(executor, decoder.function, inputs, copies, scaling);
  });
}

ffi::Error HandleGradientAmax(PlatformValue platform, AnyBuffer gate, AnyBuffer up, AnyBuffer dy, Result gate_amax,
                              Result up_amax, std::string_view kind, float alpha, float limit, float offset,
                              int64_t row_ndim, int64_t batch_ndim) {
  Decoder decoder("te_activation_gradient_amax", gate, up, kind, alpha, limit, offset, row_ndim, batch_ndim);
  const void* gradient = decoder.LikeX("dy", dy);
  float* of_gate = decoder.Floats("gate_amax", *gate_amax, 1);
  float* of_up = decoder.Floats("up_amax", *up_amax, 1, !decoder.gated());
  decoder.AbsentUnlessGated({{"up_amax", *up_amax}});
  return decoder.Run(platform, {{of_gate, 1}, {of_up, 1}}, [&](const Executor& executor, const Inputs& inputs) {
    return AmaxOfGradients(executor, decoder.function, inputs, gradient, of_gate, of_up);
  });
}

ffi::Error HandleGradientTensor(PlatformValue platform, AnyBuffer gate, AnyBuffer up, AnyBuffer dy, AnyBuffer gate_amax,
                                AnyBuffer up_amax, AnyBuffer y_amax, Result gate_data, Result gate_transposed,
                                Result gate_scale_inv, Result gate_transposed_scale_inv, Result gate_own_amax,
                                Result gate_sums, Result up_data, Result up_transposed, Result up_scale_inv,
                                Result up_transposed_scale_inv, Result up_own_amax, Result up_sums, Result y_transposed,
                                Result y_transposed_scale_inv, std::string_view kind, float alpha, float limit,
                                float offset, int64_t row_ndim, int64_t batch_ndim, bool power_of_two_scales,
                                bool y_power_of_two_scales) {
  Decoder decoder("te_activation_gradient_tensor", gate, up, kind, alpha, limit, offset, row_ndim, batch_ndim);
  const void* gradient = decoder.LikeX("dy", dy);
  Outputs<TensorScaling> outputs{};
  decoder.rules().Of("gate_");
  outputs.gate.copies = decoder.CopiesTo(*gate_data, *gate_transposed, &*gate_sums, power_of_two_scales);
  outputs.gate.scaling = decoder.TensorScalingOf(outputs.gate.copies, gate_amax, *gate_scale_inv,
                                                 *gate_transposed_scale_inv, *gate_own_amax);
  decoder.rules().Of("up_");
  if (decoder.gated()) {
    outputs.up.copies = decoder.CopiesTo(*up_data, *up_transposed, &*up_sums, power_of_two_scales);
    outputs.up.scaling =
        decoder.TensorScalingOf(outputs.up.copies, up_amax, *up_scale_inv, *up_transposed_scale_inv, *up_own_amax);
  }
  decoder.AbsentUnlessGated({{"data", *up_data},
                             {"transposed", *up_transposed},
                             {"scale_inv", *up_scale_inv},
                             {"transposed_scale_inv", *up_transposed_scale_inv},
                             {"amax_out", *up_own_amax},
                             {"dbias_partial", *up_sums}});
  decoder.rules().Of("y_");
  outputs.y.copies = decoder.TransposedTo(*y_transposed, y_power_of_two_scales);
  outputs.y.scaling.amax = decoder.Floats("amax", y_amax, 1, !outputs.y.copies.transposed);
  outputs.y.scaling.transposed_scale_inv =
      decoder.Scales("transposed_scale_inv", *y_transposed_scale_inv, 1, outputs.y.copies.transposed);
  return decoder.Run(platform, {{outputs.gate.scaling.own_amax, 1}, {outputs.up.scaling.own_amax, 1}},
                     [&](const Executor& executor, const Inputs& inputs) {
                       return GradientsInTensors(executor, decoder.function, inputs, gradient, outputs);
                     });
}

ffi::Error HandleGradientBlocks(PlatformValue platform, AnyBuffer gate, AnyBuffer up, AnyBuffer dy, AnyBuffer weights,
                                Result gate_data, Result gate_scale_inv, Result gate_transposed,
                                Result gate_transposed_scale_inv, Result gate_sums, Result up_data, Result up_scale_inv,
                                Result up_transposed, Result up_transposed_scale_inv, Result up_sums,
                                Result y_transposed, Result y_transposed_scale_inv, Result weight_sums,
                                std::string_view kind, float alpha, float limit, float offset, int64_t row_ndim,
                                int64_t batch_ndim, bool data_128x128, bool transposed_128x128,
                                bool y_transposed_128x128, bool power_of_two_scales, bool y_power_of_two_scales) {
  Decoder decoder("te_activation_gradient_blocks", gate, up, kind, alpha, limit, offset, row_ndim, batch_ndim);
  decoder.Weights(weights);
  const void* gradient = decoder.LikeX("dy", dy);
  Outputs<BlockScaling> outputs{};
  outputs.weight_sums = decoder.WeightSums(*weight_sums);
  decoder.rules().Of("gate_");
  outputs.gate.copies = decoder.CopiesTo(*gate_data, *gate_transposed, &*gate_sums, power_of_two_scales);
  outputs.gate.scaling = decoder.BlockScalingOf(outputs.gate.copies, *gate_scale_inv, *gate_transposed_scale_inv,
                                                data_128x128, transposed_128x128);
  decoder.rules().Of("up_");
  if (decoder.gated()) {
    outputs.up.copies = decoder.CopiesTo(*up_data, *up_transposed, &*up_sums, power_of_two_scales);
    outputs.up.scaling = decoder.BlockScalingOf(outputs.up.copies, *up_scale_inv, *up_transposed_scale_inv,
                                                data_128x128, transposed_128x128);
  }
  decoder.AbsentUnlessGated({{"data", *up_data},
                             {"scale_inv", *up_scale_inv},
                             {"transposed", *up_transposed},
                             {"transposed_scale_inv", *up_transposed_scale_inv},
                             {"dbias_partial", *up_sums}});
  decoder.rules().Of("y_");
  outputs.y.copies = decoder.TransposedTo(*y_transposed, y_power_of_two_scales);
  outputs.y.scaling.transposed_128x128 = y_transposed_128x128;
  outputs.y.scaling.transposed_scale_inv =
      decoder.TransposedBlockScales(outputs.y.copies, *y_transposed_scale_inv, y_transposed_128x128);
  return decoder.Run(platform, {}, [&](const Executor& executor, const Inputs& inputs) {
    return GradientsInBlocks(executor, decoder.function, inputs, gradient, outputs);
  });
}

template <typename Binding>
auto WithFunction(Binding binding) {
  return std::move(binding)
      .template Attr<std::string_view>("kind")
      .template Attr<float>("alpha")
      .template Attr<float>("limit")
      .template Attr<float>("offset")
      .template Attr<int64_t>("row_ndim")
      .template Attr<int64_t>("batch_ndim");
}

}  // namespace

// gate, up -> amax
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_activation_amax, HandleAmax, WithFunction(Buffers<2, 1>()),
                              {ffi::Traits::kCmdBufferCompatible});

// gate, up, amax -> data, transposed, scale_inv, transposed_scale_inv, amax_out
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_activation_tensor, HandleTensor,
                              WithFunction(Buffers<3, 5>()).Attr<bool>("power_of_two_scales"),
                              {ffi::Traits::kCmdBufferCompatible});

// gate, up, weights -> data, scale_inv, transposed, transposed_scale_inv
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_activation_blocks, HandleBlocks,
                              WithFunction(Buffers<3, 4>())
                                  .Attr<bool>("data_128x128")
                                  .Attr<bool>("transposed_128x128")
                                  .Attr<bool>("power_of_two_scales"),
                              {ffi::Traits::kCmdBufferCompatible});

// gate, up, dy -> gate_amax, up_amax
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_activation_gradient_amax, HandleGradientAmax, WithFunction(Buffers<3, 2>()),
                              {ffi::Traits::kCmdBufferCompatible});

// gate, up, dy, gate_amax, up_amax, y_amax -> gate_data, gate_transposed, gate_scale_inv, gate_transposed_scale_inv,
// gate_amax_out, gate_dbias_partial, up_data, up_transposed, up_scale_inv, up_transposed_scale_inv, up_amax_out,
// up_dbias_partial, y_transposed, y_transposed_scale_inv
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    te_activation_gradient_tensor, HandleGradientTensor,
    WithFunction(Buffers<6, 14>()).Attr<bool>("power_of_two_scales").Attr<bool>("y_power_of_two_scales"),
    {ffi::Traits::kCmdBufferCompatible});

// gate, up, dy, weights -> gate_data, gate_scale_inv, gate_transposed, gate_transposed_scale_inv, gate_dbias_partial,
// up_data, up_scale_inv, up_transposed, up_transposed_scale_inv, up_dbias_partial, y_transposed,
// y_transposed_scale_inv, dweights_partial
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_activation_gradient_blocks, HandleGradientBlocks,
                              WithFunction(Buffers<4, 13>())
                                  .Attr<bool>("data_128x128")
                                  .Attr<bool>("transposed_128x128")
                                  .Attr<bool>("y_transposed_128x128")
                                  .Attr<bool>("power_of_two_scales")
                                  .Attr<bool>("y_power_of_two_scales"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te::activation
