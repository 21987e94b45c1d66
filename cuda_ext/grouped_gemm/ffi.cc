#include <algorithm>

#include "gemm/ffi_types.h"
#include "grouped_gemm/grouped_gemm.h"

namespace te::grouped_gemm {
namespace {

using ffi::AnyBuffer;
using gemm::Scaling;
using Result = ffi::Result<AnyBuffer>;

constexpr std::string_view kName = "te_grouped_gemm";

// The last `count` extents of a buffer, after those of its examples.
std::optional<Sizes> DecodeLast(Rules& rules, std::string_view name, const AnyBuffer& buffer, int64_t count,
                                int64_t examples) {
  const std::optional<int64_t> batch_ndim = DimensionsBeside({count}, buffer);
  if (!batch_ndim) {
    rules.That(false, name, buffer, "have " + std::to_string(count) + " dimensions or more");
    return std::nullopt;
  }
  const Sizes dims = SizesOf(buffer);
  rules.That(CountOf(dims.first(*batch_ndim)) == examples, name, buffer, "have the examples of bounds");
  for (const int64_t size : dims.last(count)) {
    rules.That(size <= INT32_MAX, name, buffer, "have dimensions below 2^31");
  }
  if (rules.broken()) return std::nullopt;
  return dims.last(count);
}

// Those of a second pair of operands; empty without one.
struct SecondBuffers {
  AnyBuffer a, b, a_scales, b_scales;
};

void SameAs(Rules& rules, std::string_view name, const AnyBuffer& buffer, const AnyBuffer& first) {
  const Sizes dims = SizesOf(buffer), expected = SizesOf(first);
  const bool same = buffer.element_type() == first.element_type() && std::ranges::equal(dims, expected);
  rules.That(same, name, buffer, "have the type and the dimensions of the first pair's");
}

std::optional<Problem> Decode(Rules& rules, AnyBuffer a, AnyBuffer b, AnyBuffer a_scales, AnyBuffer b_scales,
                              AnyBuffer bounds, AnyBuffer bias, AnyBuffer accumulator, const SecondBuffers& second,
                              Result d, bool grouped_sums, bool b_summed_first, std::string_view scaling,
                              bool accumulate) {
  Problem problem{};
  gemm::Problem& product = problem.product;
  gemm::DecodeKind(rules, {"a", a}, {"b", b}, {"d", *d}, scaling, scaling == "block" ? "te_jax" : "cublaslt", product);
  rules.That(d->element_type() != ffi::F16, "d", *d, "be float32 or bfloat16");
  rules.Type(ffi::S32, "bounds", bounds);
  const std::optional<int64_t> batch_ndim = DimensionsBeside({2}, bounds);
  rules.That(batch_ndim.has_value(), "bounds", bounds, "have parts and groups");
  if (rules.broken()) return std::nullopt;
  const int64_t examples = CountOf(SizesOf(bounds).first(*batch_ndim));
  const auto parts_and_bounds = DecodeLast(rules, "bounds", bounds, 2, examples);
  const auto left = DecodeLast(rules, "a", a, 2, examples);
  const auto right = DecodeLast(rules, "b", b, grouped_sums ? 2 : 3, examples);
  if (rules.broken()) return std::nullopt;

  problem.grouped_sums = grouped_sums;
  problem.examples.count = examples;
  problem.parts = (*parts_and_bounds)[0];
  problem.groups = (*parts_and_bounds)[1] - 1;
  const bool plain = product.scaling == Scaling::kNone;
  // FP8 operands come as copies with their summed values last.
  const bool a_summed_first = grouped_sums && plain;
  if (grouped_sums) b_summed_first = plain;
  rules.That(plain || !b_summed_first, "b", b, "have its summed dimension last with scaling");
  product.m = (*left)[a_summed_first ? 1 : 0];
  product.k = (*left)[a_summed_first ? 0 : 1];
  const Sizes matrix = right->last(2);
  product.n = matrix[b_summed_first ? 1 : 0];
  if (matrix[b_summed_first ? 0 : 1] != product.k) {
    rules.That(false, "b", b, "sum over " + std::to_string(product.k) + " values, as a does");
  }
  rules.That(problem.groups >= 0, "bounds", bounds, "have one more bound than groups");
  const int64_t rows = grouped_sums ? product.k : product.m;
  rules.That(problem.parts >= 1 && rows % problem.parts == 0, "bounds", bounds, "cut the rows into equal parts");
  rules.That(!grouped_sums || problem.parts == 1, "bounds", bounds, "have one part where sums are grouped");
  if (rules.broken()) return std::nullopt;
  if (!grouped_sums && (*right)[0] != problem.groups) {
    rules.That(false, "b", b, "have " + std::to_string(problem.groups) + " groups, as bounds has");
  }
  const int64_t of_d = grouped_sums ? problem.groups : 1, of_b = grouped_sums ? 1 : problem.groups;
  const int64_t d_count = CountOf({examples, of_d, product.m, product.n});
  rules.Elements(d_count, "d", *d);
  const int64_t a_count = ScaleCount(product, product.m, false), b_count = ScaleCount(product, product.n, true);
  rules.Type(ffi::F32, "a_scale_inv", a_scales).Elements(CountOf({examples, a_count}), "a_scale_inv", a_scales);
  rules.Type(ffi::F32, "b_scale_inv", b_scales).Elements(CountOf({examples, of_b, b_count}), "b_scale_inv", b_scales);
  const bool has_bias = CountOf(bias) != 0, has_accumulator = CountOf(accumulator) != 0;
  if (has_bias) {
    rules.Type(d->element_type(), "bias", bias).Elements(CountOf({examples, of_b, product.n}), "bias", bias);
    rules.That(!grouped_sums, "bias", bias, "be absent where sums are grouped");
  }
  if (has_accumulator) {
    rules.Type(d->element_type(), "accumulator", accumulator).Elements(d_count, "accumulator", accumulator);
    rules.That(grouped_sums, "accumulator", accumulator, "be absent where rows are grouped");
  }
  rules.That(!accumulate || d_count == 0 || has_accumulator, "accumulator", accumulator, "be there with accumulate");
  const bool has_second = CountOf(second.a) != 0 || CountOf(second.b) != 0;
  if (has_second) {
    SameAs(rules, "second_a", second.a, a);
    SameAs(rules, "second_b", second.b, b);
    SameAs(rules, "second_a_scale_inv", second.a_scales, a_scales);
    SameAs(rules, "second_b_scale_inv", second.b_scales, b_scales);
    rules.That(!grouped_sums, "second_a", second.a, "be absent where sums are grouped");
    rules.That(plain || product.scaling == Scaling::kBlock, "second_a", second.a,
               "be absent with scales of tensors or rows");
  }
  if (rules.broken()) return std::nullopt;

  product.a = {a.untyped_data(), gemm::Present<const float>(a_scales), product.a.type, a_summed_first};
  product.b = {b.untyped_data(), gemm::Present<const float>(b_scales), product.b.type, b_summed_first};
  if (has_second) {
    problem.second = {product.a, product.b, product.k};
    problem.second->a.data = second.a.untyped_data();
    problem.second->a.scales = gemm::Present<const float>(second.a_scales);
    problem.second->b.data = second.b.untyped_data();
    problem.second->b.scales = gemm::Present<const float>(second.b_scales);
  }
  product.bias = gemm::Present<const void>(bias);
  product.accumulator = accumulate ? gemm::Present<const void>(accumulator) : nullptr;
  product.d = d->untyped_data();
  const int64_t b_size = product.n * product.k, d_size = product.m * product.n;
  const gemm::StridedBatch rows_grouped{1, 0, b_size, 0, b_count, product.n, 0}, sums_grouped{1, 0, 0, 0, 0, 0, d_size};
  product.batch = grouped_sums ? sums_grouped : rows_grouped;
  problem.examples = {
      examples,         product.m * product.k,  CountOf({of_b, b_size}), a_count, CountOf({of_b, b_count}),
      of_b * product.n, CountOf({of_d, d_size})};
  problem.bounds = static_cast<const int32_t*>(bounds.untyped_data());
  return problem;
}

ffi::Error Handle(PlatformValue platform, AnyBuffer a, AnyBuffer b, AnyBuffer a_scales, AnyBuffer b_scales,
                  AnyBuffer bounds, AnyBuffer bias, AnyBuffer accumulator, AnyBuffer second_a, AnyBuffer second_b,
                  AnyBuffer second_a_scales, AnyBuffer second_b_scales, Result d, bool grouped_sums,
                  bool b_summed_first, std::string_view scaling, bool accumulate) {
  Rules rules(kName);
  const SecondBuffers second{second_a, second_b, second_a_scales, second_b_scales};
  const std::optional<Problem> problem = Decode(rules, a, b, a_scales, b_scales, bounds, bias, accumulator, second, d,
                                                grouped_sums, b_summed_first, scaling, accumulate);
  if (!problem) return rules.error();
  if (CountOf(*d) == 0) return ffi::Error::Success();
  return ToError(kName, Run(MakeExecutor(platform), *problem));
}

}  // namespace

// a, b, a_scale_inv, b_scale_inv, bounds, bias, accumulator, second_a, second_b, second_a_scale_inv, second_b_scale_inv
// -> d
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_grouped_gemm, Handle,
                              (Buffers<11, 1>()
                                   .Attr<bool>("grouped_sums")
                                   .Attr<bool>("b_summed_first")
                                   .Attr<std::string_view>("scaling")
                                   .Attr<bool>("accumulate")),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te::grouped_gemm
