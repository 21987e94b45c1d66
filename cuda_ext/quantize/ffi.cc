#include "quantize/decoder.h"

namespace te::quantize {
namespace {

using ffi::AnyBuffer;
using Result = ffi::Result<AnyBuffer>;

ffi::Error HandleAmaxTensor(PlatformValue platform, AnyBuffer x, Result amax, int64_t row_ndim, int64_t batch_ndim) {
  Decoder decoder("te_amax_tensor", x, row_ndim, batch_ndim);
  float* out = decoder.Floats("amax", *amax, 1);
  return decoder.Run(platform, {{out, 1}},
                     [&](const auto& executor, const auto& x) { return AmaxOfTensor(executor, x, out); });
}

ffi::Error HandleAmaxRows(PlatformValue platform, AnyBuffer x, Result row_amax, Result col_amax, int64_t row_ndim,
                          int64_t batch_ndim) {
  Decoder decoder("te_amax_rows", x, row_ndim, batch_ndim);
  float* rows = decoder.Floats("row_amax", *row_amax, decoder.rows(), true);
  float* cols = decoder.Floats("col_amax", *col_amax, decoder.cols(), true);
  return decoder.Run(platform, {{rows, decoder.rows()}, {cols, decoder.cols()}},
                     [&](const auto& executor, const auto& x) { return AmaxOfRows(executor, x, rows, cols); });
}

ffi::Error HandleTensor(PlatformValue platform, AnyBuffer x, AnyBuffer amax, Result data, Result transposed,
                        Result scale_inv, Result transposed_scale_inv, Result own_amax, Result column_sums,
                        int64_t row_ndim, int64_t batch_ndim, bool power_of_two_scales) {
  Decoder decoder("te_quantize_tensor", x, row_ndim, batch_ndim);
  const Copies copies = decoder.CopiesTo(*data, *transposed, &*column_sums, power_of_two_scales);
  const TensorScaling scaling = decoder.TensorScalingOf(copies, amax, *scale_inv, *transposed_scale_inv, *own_amax);
  return decoder.Run(platform, {{scaling.own_amax, 1}},
                     [&](const auto& executor, const auto& x) { return QuantizeTensor(executor, x, copies, scaling); });
}

ffi::Error HandleRows(PlatformValue platform, AnyBuffer x, AnyBuffer row_amax, AnyBuffer col_amax, Result data,
                      Result transposed, Result row_scale_inv, Result col_scale_inv, Result column_sums,
                      int64_t row_ndim, int64_t batch_ndim, bool power_of_two_scales) {
  Decoder decoder("te_quantize_rows", x, row_ndim, batch_ndim);
  const Copies copies = decoder.CopiesTo(*data, *transposed, &*column_sums, power_of_two_scales);
  const RowScaling scaling{decoder.Floats("row_amax", row_amax, decoder.rows(), !copies.data),
                           decoder.Floats("col_amax", col_amax, decoder.cols(), !copies.transposed),
                           decoder.Scales("row_scale_inv", *row_scale_inv, decoder.rows(), copies.data),
                           decoder.Scales("col_scale_inv", *col_scale_inv, decoder.cols(), copies.transposed)};
  return decoder.Run(platform, {},
                     [&](const auto& executor, const auto& x) { return QuantizeRows(executor, x, copies, scaling); });
}

ffi::Error HandleBlocks(PlatformValue platform, AnyBuffer x, Result data, Result scale_inv, Result transposed,
                        Result transposed_scale_inv, Result column_sums, int64_t row_ndim, int64_t batch_ndim,
                        bool data_128x128, bool transposed_128x128, bool power_of_two_scales) {
  Decoder decoder("te_quantize_blocks", x, row_ndim, batch_ndim);
  const Copies copies = decoder.CopiesTo(*data, *transposed, &*column_sums, power_of_two_scales);
  const BlockScaling scaling =
      decoder.BlockScalingOf(copies, *scale_inv, *transposed_scale_inv, data_128x128, transposed_128x128);
  return decoder.Run(platform, {},
                     [&](const auto& executor, const auto& x) { return QuantizeBlocks(executor, x, copies, scaling); });
}

ffi::Error HandleBlocksOfRows(PlatformValue platform, AnyBuffer x, AnyBuffer rows, AnyBuffer order, Result data,
                              Result scale_inv, Result transposed, Result transposed_scale_inv, int64_t batch_ndim,
                              bool data_128x128, bool transposed_128x128, bool power_of_two_scales) {
  Decoder decoder("te_quantize_blocks_of_rows", x, 1, batch_ndim);
  const Gather gather = decoder.GatherBy("rows", rows, order);
  const Copies copies = decoder.CopiesTo(*data, *transposed, nullptr, power_of_two_scales);
  const BlockScaling scaling =
      decoder.BlockScalingOf(copies, *scale_inv, *transposed_scale_inv, data_128x128, transposed_128x128);
  return decoder.Run(platform, {}, [&](const auto& executor, const auto& x) {
    return QuantizeBlocksOfRows(executor, x, gather, copies, scaling);
  });
}

template <typename Binding>
auto WithDimensions(Binding binding) {
  return std::move(binding).template Attr<int64_t>("row_ndim").template Attr<int64_t>("batch_ndim");
}

}  // namespace

// x -> amax
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_amax_tensor, HandleAmaxTensor, WithDimensions(Buffers<1, 1>()),
                              {ffi::Traits::kCmdBufferCompatible});

// x -> row_amax, col_amax
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_amax_rows, HandleAmaxRows, WithDimensions(Buffers<1, 2>()),
                              {ffi::Traits::kCmdBufferCompatible});

// x, amax -> data, transposed, scale_inv, transposed_scale_inv, amax_out, dbias_partial
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_quantize_tensor, HandleTensor,
                              WithDimensions(Buffers<2, 6>()).Attr<bool>("power_of_two_scales"),
                              {ffi::Traits::kCmdBufferCompatible});

// x, row_amax, col_amax -> data, transposed, row_scale_inv, col_scale_inv, dbias_partial
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_quantize_rows, HandleRows,
                              WithDimensions(Buffers<3, 5>()).Attr<bool>("power_of_two_scales"),
                              {ffi::Traits::kCmdBufferCompatible});

// x -> data, scale_inv, transposed, transposed_scale_inv, dbias_partial
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_quantize_blocks, HandleBlocks,
                              WithDimensions(Buffers<1, 5>())
                                  .Attr<bool>("data_128x128")
                                  .Attr<bool>("transposed_128x128")
                                  .Attr<bool>("power_of_two_scales"),
                              {ffi::Traits::kCmdBufferCompatible});

// x, rows, order -> data, scale_inv, transposed, transposed_scale_inv
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_quantize_blocks_of_rows, HandleBlocksOfRows,
                              (Buffers<3, 4>()
                                   .Attr<int64_t>("batch_ndim")
                                   .Attr<bool>("data_128x128")
                                   .Attr<bool>("transposed_128x128")
                                   .Attr<bool>("power_of_two_scales")),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te::quantize
