#include "quantize/decoder.h"

namespace te::quantize {
namespace {

TE_JAX_ATTRIBUTES(Dimensions, int64_t row_ndim, batch_ndim);
TE_JAX_ATTRIBUTES(Attributes, Dimensions dimensions; bool power_of_two_scales);
TE_JAX_ATTRIBUTES(AttributesOfBlocks, Dimensions dimensions; BlockAttributes blocks);
TE_JAX_ATTRIBUTES(AttributesOfRows, int64_t batch_ndim; BlockAttributes blocks);

TE_JAX_CALL(AmaxTensorCall, (x), (amax));
TE_JAX_CALL(AmaxRowsCall, (x), (row_amax, col_amax));
TE_JAX_CALL(TensorCall, (x, amax), (data, transposed, scale_inv, transposed_scale_inv, amax_out, dbias_partial));
TE_JAX_CALL(RowsCall, (x, row_amax, col_amax), (data, transposed, row_scale_inv, col_scale_inv, dbias_partial));
TE_JAX_CALL(BlocksCall, (x), (data, scale_inv, transposed, transposed_scale_inv, dbias_partial));
TE_JAX_CALL(BlocksOfRowsCall, (x, rows, order), (data, scale_inv, transposed, transposed_scale_inv));

ffi::Error HandleAmaxTensor(PlatformValue platform, const AmaxTensorCall& call, const Dimensions& dimensions) {
  Decoder decoder("te_amax_tensor", call.x, dimensions.row_ndim, dimensions.batch_ndim);
  float* out = decoder.Floats("amax", call.amax, 1);
  return decoder.Run(platform, {{out, 1}},
                     [&](const auto& executor, const auto& x) { return AmaxOfTensor(executor, x, out); });
}

ffi::Error HandleAmaxRows(PlatformValue platform, const AmaxRowsCall& call, const Dimensions& dimensions) {
  Decoder decoder("te_amax_rows", call.x, dimensions.row_ndim, dimensions.batch_ndim);
  float* rows = decoder.Floats("row_amax", call.row_amax, decoder.rows(), true);
  float* cols = decoder.Floats("col_amax", call.col_amax, decoder.cols(), true);
  return decoder.Run(platform, {{rows, decoder.rows()}, {cols, decoder.cols()}},
                     [&](const auto& executor, const auto& x) { return AmaxOfRows(executor, x, rows, cols); });
}

ffi::Error HandleTensor(PlatformValue platform, const TensorCall& call, const Attributes& attributes) {
  Decoder decoder("te_quantize_tensor", call.x, attributes.dimensions.row_ndim, attributes.dimensions.batch_ndim);
  const Copies copies = decoder.CopiesOf(call, attributes.power_of_two_scales);
  const TensorScaling scaling = decoder.TensorScalingOf(copies, call);
  return decoder.Run(platform, {{scaling.own_amax, 1}},
                     [&](const auto& executor, const auto& x) { return QuantizeTensor(executor, x, copies, scaling); });
}

ffi::Error HandleRows(PlatformValue platform, const RowsCall& call, const Attributes& attributes) {
  Decoder decoder("te_quantize_rows", call.x, attributes.dimensions.row_ndim, attributes.dimensions.batch_ndim);
  const Copies copies = decoder.CopiesOf(call, attributes.power_of_two_scales);
  const RowScaling scaling{decoder.Floats("row_amax", call.row_amax, decoder.rows(), !copies.data),
                           decoder.Floats("col_amax", call.col_amax, decoder.cols(), !copies.transposed),
                           decoder.Scales("row_scale_inv", call.row_scale_inv, decoder.rows(), copies.data),
                           decoder.Scales("col_scale_inv", call.col_scale_inv, decoder.cols(), copies.transposed)};
  return decoder.Run(platform, {},
                     [&](const auto& executor, const auto& x) { return QuantizeRows(executor, x, copies, scaling); });
}

ffi::Error HandleBlocks(PlatformValue platform, const BlocksCall& call, const AttributesOfBlocks& attributes) {
  Decoder decoder("te_quantize_blocks", call.x, attributes.dimensions.row_ndim, attributes.dimensions.batch_ndim);
  const Copies copies = decoder.CopiesOf(call, attributes.blocks.power_of_two_scales);
  const BlockScaling scaling = decoder.BlockScalingOf(copies, call, attributes.blocks);
  return decoder.Run(platform, {},
                     [&](const auto& executor, const auto& x) { return QuantizeBlocks(executor, x, copies, scaling); });
}

ffi::Error HandleBlocksOfRows(PlatformValue platform, const BlocksOfRowsCall& call,
                              const AttributesOfRows& attributes) {
  Decoder decoder("te_quantize_blocks_of_rows", call.x, 1, attributes.batch_ndim);
  const Gather gather = decoder.GatherBy("rows", call.rows, call.order);
  const Copies copies = decoder.CopiesOf(call, attributes.blocks.power_of_two_scales);
  const BlockScaling scaling = decoder.BlockScalingOf(copies, call, attributes.blocks);
  return decoder.Run(platform, {}, [&](const auto& executor, const auto& x) {
    return QuantizeBlocksOfRows(executor, x, gather, copies, scaling);
  });
}

}  // namespace

TE_JAX_DEFINE_TARGET(te_amax_tensor, HandleAmaxTensor, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_amax_rows, HandleAmaxRows, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_quantize_tensor, HandleTensor, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_quantize_rows, HandleRows, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_quantize_blocks, HandleBlocks, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_quantize_blocks_of_rows, HandleBlocksOfRows, ffi::Traits::kCmdBufferCompatible)

}  // namespace te::quantize
