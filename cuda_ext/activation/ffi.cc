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

TE_JAX_ATTRIBUTES(Attributes, std::string_view kind; float alpha, limit, offset; int64_t row_ndim, batch_ndim);
TE_JAX_ATTRIBUTES(AttributesOfTensor, Attributes function; bool power_of_two_scales);
TE_JAX_ATTRIBUTES(AttributesOfBlocks, Attributes function; quantize::BlockAttributes blocks);
TE_JAX_ATTRIBUTES(AttributesOfGradientTensor, Attributes function; bool power_of_two_scales, y_power_of_two_scales);
TE_JAX_ATTRIBUTES(AttributesOfGradientBlocks, Attributes function; quantize::BlockAttributes blocks;
                  bool y_transposed_128x128, y_power_of_two_scales);

TE_JAX_CALL(AmaxCall, (gate, up), (amax));
TE_JAX_CALL(TensorCall, (gate, up, amax), (data, transposed, scale_inv, transposed_scale_inv, amax_out));
TE_JAX_CALL(BlocksCall, (gate, up, weights), (data, scale_inv, transposed, transposed_scale_inv));
TE_JAX_CALL(GradientAmaxCall, (gate, up, dy), (gate_amax, up_amax));
TE_JAX_CALL(GradientTensorCall, (gate, up, dy, gate_amax, up_amax, y_amax),
            (gate_data, gate_transposed, gate_scale_inv, gate_transposed_scale_inv, gate_amax_out, gate_dbias_partial,
             up_data, up_transposed, up_scale_inv, up_transposed_scale_inv, up_amax_out, up_dbias_partial, y_transposed,
             y_transposed_scale_inv));
TE_JAX_CALL(GradientBlocksCall, (gate, up, dy, weights),
            (gate_data, gate_scale_inv, gate_transposed, gate_transposed_scale_inv, gate_dbias_partial, up_data,
             up_scale_inv, up_transposed, up_transposed_scale_inv, up_dbias_partial, y_transposed,
             y_transposed_scale_inv, dweights_partial));

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
  template <typename Call>
  Decoder(std::string_view operation, const Call& call, const Attributes& attributes)
      : quantize::Decoder(operation, call.gate, attributes.row_ndim, attributes.batch_ndim, "gate"),
        function{KindOf(attributes.kind).value_or(Kind::kSilu), attributes.alpha, attributes.limit, attributes.offset} {
    rules().That(KindOf(attributes.kind).has_value(), "gate", call.gate,
                 "come with kind silu, gelu, relu or squared_relu");
    rules().That(std::isfinite(function.alpha) && std::isfinite(function.offset), "gate", call.gate,
                 "come with a finite alpha and offset");
    rules().That(function.limit > 0, "gate", call.gate, "come with a limit above 0, infinite for none");
    if (!rules().broken()) up_ = LikeX("up", call.up, true);
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

ffi::Error HandleAmax(PlatformValue platform, const AmaxCall& call, const Attributes& attributes) {
  Decoder decoder("te_activation_amax", call, attributes);
  float* out = decoder.Floats("amax", call.amax, 1);
  return decoder.Run(platform, {{out, 1}}, [&](const Executor& executor, const Inputs& inputs) {
    return AmaxOfResult(executor, decoder.function, inputs, out);
  });
}

ffi::Error HandleTensor(PlatformValue platform, const TensorCall& call, const AttributesOfTensor& attributes) {
  Decoder decoder("te_activation_tensor", call, attributes.function);
  const Copies copies = decoder.CopiesOf(call, attributes.power_of_two_scales);
  const TensorScaling scaling = decoder.TensorScalingOf(copies, call);
  return decoder.Run(platform, {{scaling.own_amax, 1}}, [&](const Executor& executor, const Inputs& inputs) {
    return ResultInTensor(executor, decoder.function, inputs, copies, scaling);
  });
}

ffi::Error HandleBlocks(PlatformValue platform, const BlocksCall& call, const AttributesOfBlocks& attributes) {
  Decoder decoder("te_activation_blocks", call, attributes.function);
  decoder.Weights(call.weights);
  const Copies copies = decoder.CopiesOf(call, attributes.blocks.power_of_two_scales);
  const BlockScaling scaling = decoder.BlockScalingOf(copies, call, attributes.blocks);
  return decoder.Run(platform, {}, [&](const Executor& executor, const Inputs& inputs) {
    return ResultInBlocks(executor, decoder.function, inputs, copies, scaling);
  });
}

ffi::Error HandleGradientAmax(PlatformValue platform, const GradientAmaxCall& call, const Attributes& attributes) {
  Decoder decoder("te_activation_gradient_amax", call, attributes);
  const void* gradient = decoder.LikeX("dy", call.dy);
  float* of_gate = decoder.Floats("gate_amax", call.gate_amax, 1);
  float* of_up = decoder.Floats("up_amax", call.up_amax, 1, !decoder.gated());
  decoder.AbsentUnlessGated({{"up_amax", call.up_amax}});
  return decoder.Run(platform, {{of_gate, 1}, {of_up, 1}}, [&](const Executor& executor, const Inputs& inputs) {
    return AmaxOfGradients(executor, decoder.function, inputs, gradient, of_gate, of_up);
  });
}

ffi::Error HandleGradientTensor(PlatformValue platform, const GradientTensorCall& call,
                                const AttributesOfGradientTensor& attributes) {
  Decoder decoder("te_activation_gradient_tensor", call, attributes.function);
  const void* gradient = decoder.LikeX("dy", call.dy);
  Outputs<TensorScaling> outputs{};
  decoder.rules().Of("gate_");
  outputs.gate.copies =
      decoder.CopiesTo(call.gate_data, call.gate_transposed, &call.gate_dbias_partial, attributes.power_of_two_scales);
  outputs.gate.scaling = decoder.TensorScalingOf(outputs.gate.copies, call.gate_amax, call.gate_scale_inv,
                                                 call.gate_transposed_scale_inv, call.gate_amax_out);
  decoder.rules().Of("up_");
  if (decoder.gated()) {
    outputs.up.copies =
        decoder.CopiesTo(call.up_data, call.up_transposed, &call.up_dbias_partial, attributes.power_of_two_scales);
    outputs.up.scaling = decoder.TensorScalingOf(outputs.up.copies, call.up_amax, call.up_scale_inv,
                                                 call.up_transposed_scale_inv, call.up_amax_out);
  }
  decoder.AbsentUnlessGated({{"data", call.up_data},
                             {"transposed", call.up_transposed},
                             {"scale_inv", call.up_scale_inv},
                             {"transposed_scale_inv", call.up_transposed_scale_inv},
                             {"amax_out", call.up_amax_out},
                             {"dbias_partial", call.up_dbias_partial}});
  decoder.rules().Of("y_");
  outputs.y.copies = decoder.TransposedTo(call.y_transposed, attributes.y_power_of_two_scales);
  outputs.y.scaling.amax = decoder.Floats("amax", call.y_amax, 1, !outputs.y.copies.transposed);
  outputs.y.scaling.transposed_scale_inv =
      decoder.Scales("transposed_scale_inv", call.y_transposed_scale_inv, 1, outputs.y.copies.transposed);
  return decoder.Run(platform, {{outputs.gate.scaling.own_amax, 1}, {outputs.up.scaling.own_amax, 1}},
                     [&](const Executor& executor, const Inputs& inputs) {
                       return GradientsInTensors(executor, decoder.function, inputs, gradient, outputs);
                     });
}

ffi::Error HandleGradientBlocks(PlatformValue platform, const GradientBlocksCall& call,
                                const AttributesOfGradientBlocks& attributes) {
  Decoder decoder("te_activation_gradient_blocks", call, attributes.function);
  decoder.Weights(call.weights);
  const void* gradient = decoder.LikeX("dy", call.dy);
  const auto [data_128x128, transposed_128x128, power_of_two_scales] = attributes.blocks;
  Outputs<BlockScaling> outputs{};
  outputs.weight_sums = decoder.WeightSums(call.dweights_partial);
  decoder.rules().Of("gate_");
  outputs.gate.copies =
      decoder.CopiesTo(call.gate_data, call.gate_transposed, &call.gate_dbias_partial, power_of_two_scales);
  outputs.gate.scaling = decoder.BlockScalingOf(outputs.gate.copies, call.gate_scale_inv,
                                                call.gate_transposed_scale_inv, data_128x128, transposed_128x128);
  decoder.rules().Of("up_");
  if (decoder.gated()) {
    outputs.up.copies = decoder.CopiesTo(call.up_data, call.up_transposed, &call.up_dbias_partial, power_of_two_scales);
    outputs.up.scaling = decoder.BlockScalingOf(outputs.up.copies, call.up_scale_inv, call.up_transposed_scale_inv,
                                                data_128x128, transposed_128x128);
  }
  decoder.AbsentUnlessGated({{"data", call.up_data},
                             {"scale_inv", call.up_scale_inv},
                             {"transposed", call.up_transposed},
                             {"transposed_scale_inv", call.up_transposed_scale_inv},
                             {"dbias_partial", call.up_dbias_partial}});
  decoder.rules().Of("y_");
  outputs.y.copies = decoder.TransposedTo(call.y_transposed, attributes.y_power_of_two_scales);
  outputs.y.scaling.transposed_128x128 = attributes.y_transposed_128x128;
  outputs.y.scaling.transposed_scale_inv =
      decoder.TransposedBlockScales(outputs.y.copies, call.y_transposed_scale_inv, attributes.y_transposed_128x128);
  return decoder.Run(platform, {}, [&](const Executor& executor, const Inputs& inputs) {
    return GradientsInBlocks(executor, decoder.function, inputs, gradient, outputs);
  });
}

}  // namespace

TE_JAX_DEFINE_TARGET(te_activation_amax, HandleAmax, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_activation_tensor, HandleTensor, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_activation_blocks, HandleBlocks, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_activation_gradient_amax, HandleGradientAmax, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_activation_gradient_tensor, HandleGradientTensor, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_activation_gradient_blocks, HandleGradientBlocks, ffi::Traits::kCmdBufferCompatible)

}  // namespace te::activation
