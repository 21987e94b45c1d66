// Checks and decodes what the handlers share whose results leave as FP8.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "common/ffi.h"
#include "quantize/quantize.h"
#ifdef TE_JAX_CUDA
#include "common/cuda_status.h"
#endif

namespace te::quantize {

inline Status SetToZero([[maybe_unused]] const Executor& executor, float* values, int64_t count) {
#ifdef TE_JAX_CUDA
  return Check(cudaMemsetAsync(values, 0, count * sizeof(float), executor.stream), "cudaMemsetAsync");
#else
  std::fill_n(values, count, 0.0f);
  return Status::Ok();
#endif
}

// The attributes of block scaling.
TE_JAX_ATTRIBUTES(BlockAttributes, bool data_128x128, transposed_128x128, power_of_two_scales);

// Checks and decodes the arguments that all handlers share. Leading dimensions from vmap make several examples, each a
// matrix of its own, one after another in every buffer.
class Decoder {
 public:
  Decoder(std::string_view operation, const ffi::AnyBuffer& x, int64_t row_ndim, int64_t batch_ndim,
          std::string_view name = "x")
      : operation_(operation), rules_(operation), x_(x) {
    const std::optional<DType> dtype = FloatingType(x);
    const Sizes sizes = SizesOf(x);
    rules_.That(dtype.has_value(), name, x, "be float32 or bfloat16");
    if (!DimensionsBeside({batch_ndim, row_ndim}, x)) {
      rules_.That(false, name, x,
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

  // Makes tables of x: the matrices have, from now on, the rows of x that an int32 buffer names. The buffer with the
  // order of tiles may have no elements.
  Gather GatherBy(std::string_view name, const ffi::AnyBuffer& index, const ffi::AnyBuffer& order) {
    const Sizes sizes = SizesOf(index);
    Gather gather{static_cast<const int32_t*>(index.untyped_data()), rows_, nullptr};
    rows_ = sizes.empty() ? 0 : sizes.back();
    rules_.Type(ffi::S32, name, index).Elements(CountOf({examples_, rows_}), name, index);
    rules_.Type(ffi::S32, "order", order);
    if (CountOf(order) > 0) {
      rules_.Elements(CountOf({examples_, row_blocks()}), "order", order);
      gather.order = static_cast<const int32_t*>(order.untyped_data());
    }
    return gather;
  }

  // An operand with the type of x and as many values; null if it is optional and has no elements.
  const void* LikeX(std::string_view name, const ffi::AnyBuffer& buffer, bool optional = false) {
    if (optional && CountOf(buffer) == 0) return nullptr;
    rules_.Type(x_.element_type(), name, buffer).Elements(count(), name, buffer);
    return buffer.untyped_data();
  }

  // A float32 buffer with `count` values for each example; null if it is optional and has no elements.
  float* Floats(std::string_view name, const ffi::AnyBuffer& buffer, int64_t count, bool optional = false) {
    if (optional && CountOf(buffer) == 0) return nullptr;
    rules_.Type(ffi::F32, name, buffer).Elements(CountOf({examples_, count}), name, buffer);
    return static_cast<float*>(buffer.untyped_data());
  }

  // The same of a copy's scales, which are absent with the copy.
  float* Scales(std::string_view name, const ffi::AnyBuffer& buffer, int64_t count, const void* copy) {
    if (copy != nullptr) return Floats(name, buffer, count);
    rules_.That(CountOf(buffer) == 0, name, buffer, "have no elements where its copy has none");
    return nullptr;
  }

  // The results that all quantizations share. Absent buffers have no elements; null: not a result of this operation.
  Copies CopiesTo(const ffi::AnyBuffer& data, const ffi::AnyBuffer& transposed, const ffi::AnyBuffer* column_sums,
                  bool power_of_two_scales) {
    const ffi::AnyBuffer& present = CountOf(data) > 0 ? data : transposed;
    rules_.That(CountOf(present) > 0 || count() == 0, "data", data, "be there where transposed is absent");
    Copies copies{Fp8Type(present).value_or(Fp8::kE4M3), power_of_two_scales, nullptr, nullptr, nullptr};
    copies.data = Codes("data", data, present.element_type());
    copies.transposed = Codes("transposed", transposed, present.element_type());
    if (column_sums != nullptr) {
      copies.column_sums = Floats("dbias_partial", *column_sums, CountOf({row_blocks(), cols_}), true);
    }
    return copies;
  }

  // The same of a call whose members have these names.
  template <typename Call>
  Copies CopiesOf(const Call& call, bool power_of_two_scales) {
    const ffi::AnyBuffer* column_sums = nullptr;
    if constexpr (requires { call.dbias_partial; }) column_sums = &call.dbias_partial;
    return CopiesTo(call.data, call.transposed, column_sums, power_of_two_scales);
  }

  // The copy as it is alone, or none.
  Copies DataTo(const ffi::AnyBuffer& data, bool power_of_two_scales) {
    return {Fp8Type(data).value_or(Fp8::kE4M3), power_of_two_scales, Codes("data", data, data.element_type()), nullptr,
            nullptr};
  }

  // The transposed copy alone, or none.
  Copies TransposedTo(const ffi::AnyBuffer& transposed, bool power_of_two_scales) {
    return {Fp8Type(transposed).value_or(Fp8::kE4M3), power_of_two_scales, nullptr,
            Codes("transposed", transposed, transposed.element_type()), nullptr};
  }

  TensorScaling TensorScalingOf(const Copies& copies, const ffi::AnyBuffer& amax, const ffi::AnyBuffer& scale_inv,
                                const ffi::AnyBuffer& transposed_scale_inv, const ffi::AnyBuffer& own_amax) {
    return {Floats("amax", amax, 1), Scales("scale_inv", scale_inv, 1, copies.data),
            Scales("transposed_scale_inv", transposed_scale_inv, 1, copies.transposed),
            Floats("amax_out", own_amax, 1, true)};
  }

  template <typename Call>
  TensorScaling TensorScalingOf(const Copies& copies, const Call& call) {
    return TensorScalingOf(copies, call.amax, call.scale_inv, call.transposed_scale_inv, call.amax_out);
  }

  BlockScaling BlockScalingOf(const Copies& copies, const ffi::AnyBuffer& scale_inv,
                              const ffi::AnyBuffer& transposed_scale_inv, bool data_128x128, bool transposed_128x128) {
    return {data_128x128, transposed_128x128,
            Scales("scale_inv", scale_inv, CountOf({col_blocks(), data_128x128 ? row_blocks() : rows_}), copies.data),
            TransposedBlockScales(copies, transposed_scale_inv, transposed_128x128)};
  }

  template <typename Call>
  BlockScaling BlockScalingOf(const Copies& copies, const Call& call, const BlockAttributes& attributes) {
    return BlockScalingOf(copies, call.scale_inv, call.transposed_scale_inv, attributes.data_128x128,
                          attributes.transposed_128x128);
  }

  float* TransposedBlockScales(const Copies& copies, const ffi::AnyBuffer& scale_inv, bool blocks_128x128) {
    const int64_t count = CountOf({row_blocks(), blocks_128x128 ? col_blocks() : cols_});
    return Scales("transposed_scale_inv", scale_inv, count, copies.transposed);
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
  uint8_t* Codes(std::string_view name, const ffi::AnyBuffer& buffer, ffi::DataType type) {
    if (CountOf(buffer) == 0) return nullptr;
    rules_.That(Fp8Type(buffer).has_value(), name, buffer, "be float8_e4m3fn or float8_e5m2")
        .Type(type, name, buffer)
        .Elements(count(), name, buffer);
    return static_cast<uint8_t*>(buffer.untyped_data());
  }

  std::string_view operation_;
  Rules rules_;
  ffi::AnyBuffer x_;
  DType dtype_ = DType::kFloat32;
  int64_t examples_ = 1;
  int64_t rows_ = 1;
  int64_t cols_ = 1;
};

}  // namespace te::quantize
