#include "gemm/ffi_types.h"
#include "symmetric_gemm/symmetric_gemm.h"

namespace te::symmetric_gemm {
namespace {

using ffi::AnyBuffer;
using gemm::Type;

TE_JAX_ATTRIBUTES(Attributes, bool summed_first; float alpha, beta, diagonal);
TE_JAX_CALL(Call, (a, b, c), (d));

constexpr std::string_view kName = "te_symmetric_gemm";

ffi::Error Handle(PlatformValue platform, const Call& call, const Attributes& attributes) {
  Rules rules(kName);
  const std::optional<Type> type = gemm::TypeOf(call.d);
  const Sizes sizes = SizesOf(call.d), of_a = SizesOf(call.a);
  rules.That(type == Type::kFloat16 || type == Type::kBFloat16, "d", call.d, "be float16 or bfloat16")
      .That(sizes.size() == 3 && sizes[1] == sizes[2], "d", call.d, "be a stack [count, m, m]")
      .That(of_a.size() == 3, "a", call.a, "be a stack [count, m, k], or [count, k, m] with summed_first");
  if (rules.broken()) return rules.error();
  Problem p{.type = *type, .count = sizes[0], .m = sizes[1], .k = of_a[attributes.summed_first ? 1 : 2]};
  const int64_t values = CountOf({p.count, p.m, p.k}), results = CountOf({p.count, p.m, p.m});
  rules.Type(call.d.element_type(), "a", call.a)
      .That(of_a[0] == p.count && of_a[attributes.summed_first ? 2 : 1] == p.m, "a", call.a, "have d's count and m")
      .Type(call.d.element_type(), "b", call.b)
      .That(SizesOf(call.b).size() == 3 && std::ranges::equal(SizesOf(call.b), of_a), "b", call.b, "have a's shape")
      .That(p.m <= INT32_MAX && p.k <= INT32_MAX && p.count <= INT32_MAX, "a", call.a, "have sizes below 2^31");
  if (CountOf(call.c) != 0) rules.Type(call.d.element_type(), "c", call.c).Elements(results, "c", call.c);
  if (rules.broken()) return rules.error();
  if (results == 0) return ffi::Error::Success();
  rules.That(values > 0, "a", call.a, "have values to sum over");
  if (rules.broken()) return rules.error();
  p.a = call.a.untyped_data(), p.b = call.b.untyped_data(), p.c = gemm::Present<const void>(call.c);
  p.summed_first = attributes.summed_first;
  p.alpha = attributes.alpha, p.beta = attributes.beta, p.diagonal = attributes.diagonal;
  p.d = call.d.untyped_data();
  return ToError(kName, Run(MakeExecutor(platform), p));
}

}  // namespace

TE_JAX_DEFINE_TARGET(te_symmetric_gemm, Handle, ffi::Traits::kCmdBufferCompatible)

}  // namespace te::symmetric_gemm
