#include <algorithm>

#include "gemm/ffi_types.h"
#include "grouped_gemm/grouped_gemm.h"

namespace te::grouped_gemm {
namespace {

using ffi::AnyBuffer;
using gemm::Scaling;

TE_JAX_ATTRIBUTES(Attributes, bool grouped_sums, b_summed_first; std::string_view scaling; bool accumulate);

TE_JAX_CALL(Call,
            (a, b, a_scale_inv, b_scale_inv, bounds, bias, accumulator, second_a, second_b, second_a_scale_inv,
             second_b_scale_inv),
            (d));

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

void SameAs(Rules& rules, std::string_view name, const AnyBuffer& buffer, const AnyBuffer& first) {
  const Sizes dims = SizesOf(buffer), expected = SizesOf(first);
  const bool same = buffer.element_type() == first.element_type() && std::ranges::equal(dims, expected);
  rules.That(same, name, buffer, "have the type and the dimensions of the first pair's");
}

std::optional<Problem> Decode(Rules& rules, const Call& call, const Attributes& attributes) {
  const bool grouped_sums = attributes.grouped_sums;
  bool b_summed_first = attributes.b_summed_first;
  Problem problem{};
  gemm::Problem& product = problem.product;
  gemm::DecodeKind(rules, {"a", call.a}, {"b", call.b}, {"d", call.d}, attributes.scaling,
                   attributes.scaling == "block" ? "te_jax" : "cublaslt", product);
  rules.That(call.d.element_type() != ffi::F16, "d", call.d, "be float32 or bfloat16");
  rules.Type(ffi::S32, "bounds", call.bounds);
  const std::optional<int64_t> batch_ndim = DimensionsBeside({2}, call.bounds);
  rules.That(batch_ndim.has_value(), "bounds", call.bounds, "have parts and groups");
  if (rules.broken()) return std::nullopt;
  const int64_t examples = CountOf(SizesOf(call.bounds).first(*batch_ndim));
  const auto parts_and_bounds = DecodeLast(rules, "bounds", call.bounds, 2, examples);
  const auto left = DecodeLast(rules, "a", call.a, 2, examples);
  const auto right = DecodeLast(rules, "b", call.b, grouped_sums ? 2 : 3, examples);
  if (rules.broken()) return std::nullopt;

  problem.grouped_sums = grouped_sums;
  problem.examples.count = examples;
  problem.parts = (*parts_and_bounds)[0];
  problem.groups = (*parts_and_bounds)[1] - 1;
  const bool plain = product.scaling == Scaling::kNone;
  // FP8 operands come as copies with their summed values last.
  const bool a_summed_first = grouped_sums && plain;
  if (grouped_sums) b_summed_first = plain;
  rules.That(plain || !b_summed_first, "b", call.b, "have its summed dimension last with scaling");
  product.m = (*left)[a_summed_first ? 1 : 0];
  product.k = (*left)[a_summed_first ? 0 : 1];
  const Sizes matrix = right->last(2);
  product.n = matrix[b_summed_first ? 1 : 0];
  if (matrix[b_summed_first ? 0 : 1] != product.k) {
    rules.That(false, "b", call.b, "sum over " + std::to_string(product.k) + " values, as a does");
  }
  rules.That(problem.groups >= 0, "bounds", call.bounds, "have one more bound than groups");
  const int64_t rows = grouped_sums ? product.k : product.m;
  rules.That(problem.parts >= 1 && rows % problem.parts == 0, "bounds", call.bounds, "cut the rows into equal parts");
  rules.That(!grouped_sums || problem.parts == 1, "bounds", call.bounds, "have one part where sums are grouped");
  if (rules.broken()) return std::nullopt;
  if (!grouped_sums && (*right)[0] != problem.groups) {
    rules.That(false, "b", call.b, "have " + std::to_string(problem.groups) + " groups, as bounds has");
  }
  const int64_t of_d = grouped_sums ? problem.groups : 1, of_b = grouped_sums ? 1 : problem.groups;
  const int64_t d_count = CountOf({examples, of_d, product.m, product.n});
  rules.Elements(d_count, "d", call.d);
  const int64_t a_count = ScaleCount(product, product.m, false), b_count = ScaleCount(product, product.n, true);
  rules.Type(ffi::F32, "a_scale_inv", call.a_scale_inv)
      .Elements(CountOf({examples, a_count}), "a_scale_inv", call.a_scale_inv);
  rules.Type(ffi::F32, "b_scale_inv", call.b_scale_inv)
      .Elements(CountOf({examples, of_b, b_count}), "b_scale_inv", call.b_scale_inv);
  const bool has_bias = CountOf(call.bias) != 0, has_accumulator = CountOf(call.accumulator) != 0;
  if (has_bias) {
    rules.Type(call.d.element_type(), "bias", call.bias)
        .Elements(CountOf({examples, of_b, product.n}), "bias", call.bias);
    rules.That(!grouped_sums, "bias", call.bias, "be absent where sums are grouped");
  }
  if (has_accumulator) {
    rules.Type(call.d.element_type(), "accumulator", call.accumulator)
        .Elements(d_count, "accumulator", call.accumulator);
    rules.That(grouped_sums, "accumulator", call.accumulator, "be absent where rows are grouped");
  }
  rules.That(!attributes.accumulate || d_count == 0 || has_accumulator, "accumulator", call.accumulator,
             "be there with accumulate");
  const bool has_second = CountOf(call.second_a) != 0 || CountOf(call.second_b) != 0;
  if (has_second) {
    SameAs(rules, "second_a", call.second_a, call.a);
    SameAs(rules, "second_b", call.second_b, call.b);
    SameAs(rules, "second_a_scale_inv", call.second_a_scale_inv, call.a_scale_inv);
    SameAs(rules, "second_b_scale_inv", call.second_b_scale_inv, call.b_scale_inv);
    rules.That(!grouped_sums, "second_a", call.second_a, "be absent where sums are grouped");
    rules.That(plain || product.scaling == Scaling::kBlock, "second_a", call.second_a,
               "be absent with scales of tensors or rows");
  }
  if (rules.broken()) return std::nullopt;

  product.a = {call.a.untyped_data(), gemm::Present<const float>(call.a_scale_inv), product.a.type, a_summed_first};
  product.b = {call.b.untyped_data(), gemm::Present<const float>(call.b_scale_inv), product.b.type, b_summed_first};
  if (has_second) {
    problem.second = {product.a, product.b, product.k};
    problem.second->a.data = call.second_a.untyped_data();
    problem.second->a.scales = gemm::Present<const float>(call.second_a_scale_inv);
    problem.second->b.data = call.second_b.untyped_data();
    problem.second->b.scales = gemm::Present<const float>(call.second_b_scale_inv);
  }
  product.bias = gemm::Present<const void>(call.bias);
  product.accumulator = attributes.accumulate ? gemm::Present<const void>(call.accumulator) : nullptr;
  product.d = call.d.untyped_data();
  const int64_t b_size = product.n * product.k, d_size = product.m * product.n;
  const gemm::StridedBatch rows_grouped{1, 0, b_size, 0, b_count, product.n, 0}, sums_grouped{1, 0, 0, 0, 0, 0, d_size};
  product.batch = grouped_sums ? sums_grouped : rows_grouped;
  problem.examples = {
      examples,         product.m * product.k,  CountOf({of_b, b_size}), a_count, CountOf({of_b, b_count}),
      of_b * product.n, CountOf({of_d, d_size})};
  problem.bounds = static_cast<const int32_t*>(call.bounds.untyped_data());
  return problem;
}

ffi::Error Handle(PlatformValue platform, const Call& call, const Attributes& attributes) {
  Rules rules(kName);
  const std::optional<Problem> problem = Decode(rules, call, attributes);
  if (!problem) return rules.error();
  if (CountOf(call.d) == 0) return ffi::Error::Success();
  return ToError(kName, Run(MakeExecutor(platform), *problem));
}

}  // namespace

TE_JAX_DEFINE_TARGET(te_grouped_gemm, Handle, ffi::Traits::kCmdBufferCompatible)

}  // namespace te::grouped_gemm
