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

}  // namespace
}  // namespace te::quantize

XLA_FFI_DEFINE_HANDLER_SYMBOL(te_amax_tensor, te::quantize::HandleAmaxTensor,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<te::Platform>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Ret<xla::ffi::AnyBuffer>()  // amax
                                  .Attr<int64_t>("row_ndim")
                                  .Attr<int64_t>("batch_ndim"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(te_amax_rows, te::quantize::HandleAmaxRows,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<te::Platform>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Ret<xla::ffi::AnyBuffer>()  // row_amax
                                  .Ret<xla::ffi::AnyBuffer>()  // col_amax
                                  .Attr<int64_t>("row_ndim")
                                  .Attr<int64_t>("batch_ndim"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(te_quantize_tensor, te::quantize::HandleTensor,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<te::Platform>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // amax
                                  .Ret<xla::ffi::AnyBuffer>()  // data
                                  .Ret<xla::ffi::AnyBuffer>()  // transposed
                                  .Ret<xla::ffi::AnyBuffer>()  // scale_inv
                                  .Ret<xla::ffi::AnyBuffer>()  // transposed_scale_inv
                                  .Ret<xla::ffi::AnyBuffer>()  // amax_out
                                  .Ret<xla::ffi::AnyBuffer>()  // dbias_partial
                                  .Attr<int64_t>("row_ndim")
                                  .Attr<int64_t>("batch_ndim")
                                  .Attr<bool>("power_of_two_scales"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(te_quantize_rows, te::quantize::HandleRows,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<te::Platform>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // row_amax
                                  .Arg<xla::ffi::AnyBuffer>()  // col_amax
                                  .Ret<xla::ffi::AnyBuffer>()  // data
                                  .Ret<xla::ffi::AnyBuffer>()  // transposed
                                  .Ret<xla::ffi::AnyBuffer>()  // row_scale_inv
                                  .Ret<xla::ffi::AnyBuffer>()  // col_scale_inv
                                  .Ret<xla::ffi::AnyBuffer>()  // dbias_partial
                                  .Attr<int64_t>("row_ndim")
                                  .Attr<int64_t>("batch_ndim")
                                  .Attr<bool>("power_of_two_scales"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(te_quantize_blocks, te::quantize::HandleBlocks,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<te::Platform>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Ret<xla::ffi::AnyBuffer>()  // data
                                  .Ret<xla::ffi::AnyBuffer>()  // scale_inv
                                  .Ret<xla::ffi::AnyBuffer>()  // transposed
                                  .Ret<xla::ffi::AnyBuffer>()  // transposed_scale_inv
                                  .Ret<xla::ffi::AnyBuffer>()  // dbias_partial
                                  .Attr<int64_t>("row_ndim")
                                  .Attr<int64_t>("batch_ndim")
                                  .Attr<bool>("data_128x128")
                                  .Attr<bool>("transposed_128x128")
                                  .Attr<bool>("power_of_two_scales"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(te_quantize_blocks_of_rows, te::quantize::HandleBlocksOfRows,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<te::Platform>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // rows
                                  .Arg<xla::ffi::AnyBuffer>()  // order
                                  .Ret<xla::ffi::AnyBuffer>()  // data
                                  .Ret<xla::ffi::AnyBuffer>()  // scale_inv
                                  .Ret<xla::ffi::AnyBuffer>()  // transposed
                                  .Ret<xla::ffi::AnyBuffer>()  // transposed_scale_inv
                                  .Attr<int64_t>("batch_ndim")
                                  .Attr<bool>("data_128x128")
                                  .Attr<bool>("transposed_128x128")
                                  .Attr<bool>("power_of_two_scales"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
