#include "common/ffi.h"

#include "quantize/quantize.h"

namespace te::quantize {
namespace {

using ffi::AnyBuffer;
using Result = ffi::Result<AnyBuffer>;

// Checks and decodes the arguments that all handlers share. Leading dimensions from vmap make several examples, each a
// matrix of its own, one after another in every buffer.
class Decoder {
 public:
  Decoder(std::string_view operation, const AnyBuffer& x, int64_t row_ndim, int64_t batch_ndim)
      : operation_(operation), rules_(operation), x_(x) {
    const std::optional<DType> dtype = FloatingType(x);
    const auto dims = x.dimensions();
    const int64_t ndim = static_cast<int64_t>(dims.size());
    rules_.That(dtype.has_value(), "x", x, "be float32, bfloat16 or float16");
    if (batch_ndim < 0 || row_ndim < 0 || batch_ndim + row_ndim > ndim) {
      rules_.That(false, "x", x,
                  "have batch_ndim (" + std::to_string(batch_ndim) + ") and row_ndim (" + std::to_string(row_ndim) +
                      ") dimensions");
    }
    if (rules_.broken()) return;
    for (int64_t i = 0; i < ndim; ++i) {
      (i < batch_ndim ? examples_ : i < batch_ndim + row_ndim ? rows_ : cols_) *= dims[i];
    }
    dtype_ = *dtype;
  }

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t row_blocks() const { return (rows_ + kBlock - 1) / kBlock; }
  int64_t col_blocks() const { return (cols_ + kBlock - 1) / kBlock; }
  Rules& rules() { return rules_; }

  // A float32 buffer with `count` values for each example; null if it is optional and has no elements.
  float* Floats(std::string_view name, const AnyBuffer& buffer, int64_t count, bool optional = false) {
    if (optional && buffer.element_count() == 0) return nullptr;
    rules_.Type(ffi::F32, name, buffer).Elements(examples_ * count, name, buffer);
    return static_cast<float*>(buffer.untyped_data());
  }

  // The results that all quantizations share. Absent buffers have no elements.
  Copies CopiesTo(const AnyBuffer& data, const AnyBuffer& transposed, const AnyBuffer& column_sums,
                  bool power_of_two_scales) {
    const AnyBuffer& present = data.element_count() ? data : transposed;
    rules_.That(present.element_count() > 0 || examples_ * rows_ * cols_ == 0, "data", data,
                "be there where transposed is absent");
    Copies copies{Fp8Type(present).value_or(Fp8::kE4M3), power_of_two_scales, nullptr, nullptr, nullptr};
    copies.data = Codes("data", data, present.element_type());
    copies.transposed = Codes("transposed", transposed, present.element_type());
    copies.column_sums = Floats("dbias_partial", column_sums, row_blocks() * cols_, true);
    return copies;
  }

  // Runs launch(x) unless there is nothing to do.
  template <typename Launch>
  ffi::Error Run(const Launch& launch) const {
    if (rules_.broken()) return rules_.error();
    if (examples_ * rows_ * cols_ == 0) return ffi::Error::Success();
    return ToError(operation_, launch(Matrices{dtype_, x_.untyped_data(), examples_, rows_, cols_}));
  }

 private:
  // As many FP8 values as x has, or null where absent.
  uint8_t* Codes(std::string_view name, const AnyBuffer& buffer, ffi::DataType type) {
    if (buffer.element_count() == 0) return nullptr;
    rules_.That(Fp8Type(buffer).has_value(), name, buffer, "be float8_e4m3fn or float8_e5m2")
        .Type(type, name, buffer)
        .Elements(examples_ * rows_ * cols_, name, buffer);
    return static_cast<uint8_t*>(buffer.untyped_data());
  }

  std::string_view operation_;
  Rules rules_;
  AnyBuffer x_;
  DType dtype_ = DType::kFloat32;
  int64_t examples_ = 1;
  int64_t rows_ = 1;
  int64_t cols_ = 1;
};

ffi::Error HandleAmaxTensor(PlatformValue platform, AnyBuffer x, Result amax, int64_t row_ndim, int64_t batch_ndim) {
  Decoder decoder("te_amax_tensor", x, row_ndim, batch_ndim);
  float* out = decoder.Floats("amax", *amax, 1);
  return decoder.Run([&](const Matrices& x) { return AmaxOfTensor(MakeExecutor(platform), x, out); });
}

ffi::Error HandleAmaxRows(PlatformValue platform, AnyBuffer x, Result row_amax, Result col_amax, int64_t row_ndim,
                          int64_t batch_ndim) {
  Decoder decoder("te_amax_rows", x, row_ndim, batch_ndim);
  float* rows = decoder.Floats("row_amax", *row_amax, decoder.rows(), true);
  float* cols = decoder.Floats("col_amax", *col_amax, decoder.cols(), true);
  return decoder.Run([&](const Matrices& x) { return AmaxOfRows(MakeExecutor(platform), x, rows, cols); });
}

ffi::Error HandleTensor(PlatformValue platform, AnyBuffer x, AnyBuffer amax, Result data, Result transposed,
                        Result scale_inv, Result transposed_scale_inv, Result own_amax, Result column_sums,
                        int64_t row_ndim, int64_t batch_ndim, bool power_of_two_scales) {
  Decoder decoder("te_quantize_tensor", x, row_ndim, batch_ndim);
  const Copies copies = decoder.CopiesTo(*data, *transposed, *column_sums, power_of_two_scales);
  const TensorScaling scaling{decoder.Floats("amax", amax, 1), decoder.Floats("scale_inv", *scale_inv, 1, !copies.data),
                              decoder.Floats("transposed_scale_inv", *transposed_scale_inv, 1, !copies.transposed),
                              decoder.Floats("amax_out", *own_amax, 1, true)};
  return decoder.Run([&](const Matrices& x) { return QuantizeTensor(MakeExecutor(platform), x, copies, scaling); });
}

ffi::Error HandleRows(PlatformValue platform, AnyBuffer x, AnyBuffer row_amax, AnyBuffer col_amax, Result data,
                      Result transposed, Result row_scale_inv, Result col_scale_inv, Result column_sums,
                      int64_t row_ndim, int64_t batch_ndim, bool power_of_two_scales) {
  Decoder decoder("te_quantize_rows", x, row_ndim, batch_ndim);
  const Copies copies = decoder.CopiesTo(*data, *transposed, *column_sums, power_of_two_scales);
  const bool no_data = !copies.data, no_transposed = !copies.transposed;
  const RowScaling scaling{decoder.Floats("row_amax", row_amax, decoder.rows(), no_data),
                           decoder.Floats("col_amax", col_amax, decoder.cols(), no_transposed),
                           decoder.Floats("row_scale_inv", *row_scale_inv, decoder.rows(), no_data),
                           decoder.Floats("col_scale_inv", *col_scale_inv, decoder.cols(), no_transposed)};
  return decoder.Run([&](const Matrices& x) { return QuantizeRows(MakeExecutor(platform), x, copies, scaling); });
}

ffi::Error HandleBlocks(PlatformValue platform, AnyBuffer x, Result data, Result scale_inv, Result transposed,
                        Result transposed_scale_inv, Result column_sums, int64_t row_ndim, int64_t batch_ndim,
                        bool data_128x128, bool transposed_128x128, bool power_of_two_scales) {
  Decoder decoder("te_quantize_blocks", x, row_ndim, batch_ndim);
  const Copies copies = decoder.CopiesTo(*data, *transposed, *column_sums, power_of_two_scales);
  const int64_t blocks = decoder.row_blocks() * decoder.col_blocks();
  const int64_t count = data_128x128 ? blocks : decoder.col_blocks() * decoder.rows();
  const int64_t transposed_count = transposed_128x128 ? blocks : decoder.row_blocks() * decoder.cols();
  const BlockScaling scaling{
      data_128x128, transposed_128x128, decoder.Floats("scale_inv", *scale_inv, count, !copies.data),
      decoder.Floats("transposed_scale_inv", *transposed_scale_inv, transposed_count, !copies.transposed)};
  return decoder.Run([&](const Matrices& x) { return QuantizeBlocks(MakeExecutor(platform), x, copies, scaling); });
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
