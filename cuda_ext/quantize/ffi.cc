#include "common/ffi.h"

#include <algorithm>

#ifdef TE_JAX_CUDA
#include "common/cuda_status.h"
#endif
#include "quantize/quantize.h"

namespace te::quantize {
namespace {

using ffi::AnyBuffer;
using Result = ffi::Result<AnyBuffer>;

Status SetToZero([[maybe_unused]] const Executor& executor, float* values, int64_t count) {
#ifdef TE_JAX_CUDA
  return Check(cudaMemsetAsync(values, 0, count * sizeof(float), executor.stream), "cudaMemsetAsync");
#else
  std::fill_n(values, count, 0.0f);
  return Status::Ok();
#endif
}

// Checks and decodes the arguments that all handlers share. Leading dimensions from vmap make several examples, each a
// matrix of its own, one after another in every buffer.
class Decoder {
 public:
  Decoder(std::string_view operation, const AnyBuffer& x, int64_t row_ndim, int64_t batch_ndim)
      : operation_(operation), rules_(operation), x_(x) {
    const std::optional<DType> dtype = FloatingType(x);
    const Sizes sizes = SizesOf(x);
    rules_.That(dtype.has_value(), "x", x, "be float32, bfloat16 or float16");
    if (!DimensionsBeside({batch_ndim, row_ndim}, x)) {
      rules_.That(false, "x", x,
                  "have batch_ndim (" + std::to_string(batch_ndim) + ") and row_ndim (" + std::to_string(row_ndim) +
                      ") dimensions");
    }
    if (rules_.broken()) return;
    examples_ = CountOf(sizes.first(batch_ndim));
    rows_ = CountOf(sizes.subspan(batch_ndim, row_ndim));
    cols_ = CountOf(sizes.subspan(batch_ndim + row_ndim));
    dtype_ = *dtype;
  }

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t row_blocks() const { return Blocks(rows_); }
  int64_t col_blocks() const { return Blocks(cols_); }
  Rules& rules() { return rules_; }

  // A float32 buffer with `count` values for each example; null if it is optional and has no elements.
  float* Floats(std::string_view name, const AnyBuffer& buffer, int64_t count, bool optional = false) {
    if (optional && CountOf(buffer) == 0) return nullptr;
    rules_.Type(ffi::F32, name, buffer).Elements(CountOf({examples_, count}), name, buffer);
    return static_cast<float*>(buffer.untyped_data());
  }

  // The same of a copy's scales, which are absent with the copy.
  float* Scales(std::string_view name, const AnyBuffer& buffer, int64_t count, const void* copy) {
    if (copy != nullptr) return Floats(name, buffer, count);
    rules_.That(CountOf(buffer) == 0, name, buffer, "have no elements where its copy of x has none");
    return nullptr;
  }

  // The results that all quantizations share. Absent buffers have no elements.
  Copies CopiesTo(const AnyBuffer& data, const AnyBuffer& transposed, const AnyBuffer& column_sums,
                  bool power_of_two_scales) {
    const AnyBuffer& present = CountOf(data) > 0 ? data : transposed;
    rules_.That(CountOf(present) > 0 || count() == 0, "data", data, "be there where transposed is absent");
    Copies copies{Fp8Type(present).value_or(Fp8::kE4M3), power_of_two_scales, nullptr, nullptr, nullptr};
    copies.data = Codes("data", data, present.element_type());
    copies.transposed = Codes("transposed", transposed, present.element_type());
    copies.column_sums = Floats("dbias_partial", column_sums, CountOf({row_blocks(), cols_}), true);
    return copies;
  }

  // An array of amaxes and its length; no array where it is null.
  struct Amaxes {
    float* values;
    int64_t count;
  };

  // Runs launch(executor, x). Without values there is nothing to do but to set amaxes to zero.
  template <typename Launch>
  ffi::Error Run(PlatformValue platform, std::initializer_list<Amaxes> amaxes, const Launch& launch) const {
    if (rules_.broken()) return rules_.error();
    const Executor executor = MakeExecutor(platform);
    if (count() != 0) {
      return ToError(operation_, launch(executor, Matrices{dtype_, x_.untyped_data(), examples_, rows_, cols_}));
    }
    Status status = Status::Ok();
    for (const auto& [values, of_each] : amaxes) {
      if (values != nullptr && status.ok()) status = SetToZero(executor, values, CountOf({examples_, of_each}));
    }
    return ToError(operation_, status);
  }

 private:
  static int64_t Blocks(int64_t size) { return size / kBlock + (size % kBlock != 0); }

  int64_t count() const { return CountOf({examples_, rows_, cols_}); }

  // As many FP8 values as x has, or null where absent.
  uint8_t* Codes(std::string_view name, const AnyBuffer& buffer, ffi::DataType type) {
    if (CountOf(buffer) == 0) return nullptr;
    rules_.That(Fp8Type(buffer).has_value(), name, buffer, "be float8_e4m3fn or float8_e5m2")
        .Type(type, name, buffer)
        .Elements(count(), name, buffer);
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
  const Copies copies = decoder.CopiesTo(*data, *transposed, *column_sums, power_of_two_scales);
  const TensorScaling scaling{decoder.Floats("amax", amax, 1), decoder.Scales("scale_inv", *scale_inv, 1, copies.data),
                              decoder.Scales("transposed_scale_inv", *transposed_scale_inv, 1, copies.transposed),
                              decoder.Floats("amax_out", *own_amax, 1, true)};
  return decoder.Run(platform, {{scaling.own_amax, 1}},
                     [&](const auto& executor, const auto& x) { return QuantizeTensor(executor, x, copies, scaling); });
}

ffi::Error HandleRows(PlatformValue platform, AnyBuffer x, AnyBuffer row_amax, AnyBuffer col_amax, Result data,
                      Result transposed, Result row_scale_inv, Result col_scale_inv, Result column_sums,
                      int64_t row_ndim, int64_t batch_ndim, bool power_of_two_scales) {
  Decoder decoder("te_quantize_rows", x, row_ndim, batch_ndim);
  const Copies copies = decoder.CopiesTo(*data, *transposed, *column_sums, power_of_two_scales);
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
  const Copies copies = decoder.CopiesTo(*data, *transposed, *column_sums, power_of_two_scales);
  const int64_t count = CountOf({decoder.col_blocks(), data_128x128 ? decoder.row_blocks() : decoder.rows()});
  const int64_t transposed_count =
      CountOf({decoder.row_blocks(), transposed_128x128 ? decoder.col_blocks() : decoder.cols()});
  const BlockScaling scaling{
      data_128x128, transposed_128x128, decoder.Scales("scale_inv", *scale_inv, count, copies.data),
      decoder.Scales("transposed_scale_inv", *transposed_scale_inv, transposed_count, copies.transposed)};
  return decoder.Run(platform, {},
                     [&](const auto& executor, const auto& x) { return QuantizeBlocks(executor, x, copies, scaling); });
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
