#include <vector>

#include "gemm/ffi_types.h"

namespace te::gemm {
namespace {

using ffi::AnyBuffer;
using Result = ffi::Result<AnyBuffer>;

constexpr std::string_view kName = "te_gemm", kSumName = "te_gemm_sum";

// The groups of dimensions of an operand [*batch, *outer, *summed], or [*batch, *summed, *outer].
struct Groups {
  int64_t outer;
  int64_t summed;
  bool outer_in_blocks;  // blocks of 128 outer, and of 128 summed values do not cross the last dimension of a group
  bool summed_in_blocks;
};

std::optional<Groups> DecodeGroups(Rules& rules, std::string_view name, const AnyBuffer& buffer, int64_t batch_ndim,
                                   int64_t batch, int64_t outer_ndim, bool summed_first) {
  const Sizes dims = SizesOf(buffer);
  const std::optional<int64_t> summed_ndim = DimensionsBeside({batch_ndim, outer_ndim}, buffer);
  rules.That(summed_ndim.has_value(), name, buffer, "have all of its batch and outer dimensions");
  if (rules.broken()) return std::nullopt;
  const auto outer = dims.subspan(batch_ndim + (summed_first ? *summed_ndim : 0), outer_ndim);
  const auto summed = dims.subspan(batch_ndim + (summed_first ? 0 : outer_ndim), *summed_ndim);
  auto in_blocks = [](Sizes group) {
    return group.size() == 1 || (group.size() > 1 && group.back() % kBlockSize == 0);
  };
  const Groups groups{CountOf(outer), CountOf(summed), in_blocks(outer), in_blocks(summed)};
  rules.That(CountOf(dims.first(batch_ndim)) == batch, name, buffer, "have the batch of d");
  rules.That(groups.outer <= INT32_MAX && groups.summed <= INT32_MAX, name, buffer,
             "have groups of dimensions below 2^31");
  return groups;
}

std::optional<Problem> Decode(Rules& rules, AnyBuffer a, AnyBuffer b, AnyBuffer a_scales, AnyBuffer b_scales,
                              AnyBuffer bias, AnyBuffer accumulator, Result d, Result preactivation, Result workspace,
                              int64_t a_outer_ndim, int64_t b_outer_ndim, bool a_summed_first, bool b_summed_first,
                              std::string_view scaling, bool gelu, bool accumulate, bool fast_accumulation,
                              std::string_view algorithm) {
  Problem problem{};
  DecodeKind(rules, {"a", a}, {"b", b}, {"d", *d}, scaling, algorithm, problem);
  const std::optional<int64_t> batch_ndim = DimensionsBeside({a_outer_ndim, b_outer_ndim}, *d);
  rules.That(batch_ndim.has_value(), "d", *d, "have the outer dimensions of a and of b");
  if (rules.broken()) return std::nullopt;
  const int64_t batch = CountOf(SizesOf(*d).first(*batch_ndim));
  const auto left = DecodeGroups(rules, "a", a, *batch_ndim, batch, a_outer_ndim, a_summed_first);
  const auto right = DecodeGroups(rules, "b", b, *batch_ndim, batch, b_outer_ndim, b_summed_first);
  if (rules.broken()) return std::nullopt;
  problem.m = left->outer;
  problem.n = right->outer;
  problem.k = left->summed;
  if (right->summed != problem.k) {
    rules.That(false, "b", b, "sum over " + std::to_string(problem.k) + " values, as a does");
  }
  const int64_t d_count = CountOf({batch, problem.m, problem.n});
  rules.Elements(d_count, "d", *d);

  const bool plain = problem.scaling == Scaling::kNone;
  rules.That(plain || !(a_summed_first || b_summed_first), "a", a, "have its summed dimensions last with scaling");
  if (problem.scaling == Scaling::kBlock) {
    rules.That(left->summed_in_blocks, "a", a, "have a last summed dimension of a multiple of 128");
    rules.That(right->outer_in_blocks, "b", b, "have a last outer dimension of a multiple of 128");
  }
  const int64_t a_count = ScaleCount(problem, problem.m, false), b_count = ScaleCount(problem, problem.n, true);
  rules.Type(ffi::F32, "a_scale_inv", a_scales).Elements(CountOf({batch, a_count}), "a_scale_inv", a_scales);
  rules.Type(ffi::F32, "b_scale_inv", b_scales).Elements(CountOf({batch, b_count}), "b_scale_inv", b_scales);

  auto optional = [&](std::string_view name, const AnyBuffer& buffer, int64_t count) {
    if (CountOf(buffer) != 0) rules.Type(d->element_type(), name, buffer).Elements(count, name, buffer);
  };
  optional("bias", bias, CountOf({batch, problem.n}));
  optional("accumulator", accumulator, d_count);
  optional("preactivation", *preactivation, d_count);
  const bool has_bias = CountOf(bias) != 0;
  rules.That(!gelu || plain || problem.scaling == Scaling::kTensor, "d", *d,
             "come without gelu with row or block scaling");
  rules.That(!gelu || problem.algorithm != Algorithm::kTeJax, "d", *d, "come without gelu with algorithm te_jax");
  rules.That(!gelu || problem.d_type != Type::kFloat32, "d", *d, "be of 16 bits for gelu");
  rules.That(gelu || CountOf(*preactivation) == 0, "preactivation", *preactivation, "come with gelu");
  rules.That(problem.scaling != Scaling::kTensor || problem.d_type != Type::kFloat32 || !has_bias, "bias", bias,
             "be absent where tensors in FP8 give float32");
  rules.That(!accumulate || d_count == 0 || CountOf(accumulator) != 0, "accumulator", accumulator,
             "be there with accumulate");
  rules.That(!accumulate || !(has_bias || gelu), "accumulator", accumulator, "come without bias and gelu");
  const int64_t workspace_bytes = WorkspaceBytes(rules, *workspace);
  if (rules.broken()) return std::nullopt;

  problem.a = {a.untyped_data(), Present<const float>(a_scales), problem.a.type, a_summed_first};
  problem.b = {b.untyped_data(), Present<const float>(b_scales), problem.b.type, b_summed_first};
  problem.fast_accumulation = fast_accumulation;
  problem.gelu = gelu;
  problem.bias = Present<const void>(bias);
  problem.accumulator = accumulate ? Present<const void>(accumulator) : nullptr;
  problem.preactivation = Present<void>(*preactivation);
  problem.d = d->untyped_data();
  problem.workspace = Present<void>(*workspace);
  problem.workspace_bytes = workspace_bytes;
  problem.batch = {batch,   problem.m * problem.k,    problem.n * problem.k, a_count,
                   b_count, has_bias ? problem.n : 0, problem.m * problem.n};
  return problem;
}

// Both stages take the same operands, results and attributes.
template <Status (*kDo)(const Executor&, const Problem&)>
struct Handle {
  template <typename... Arguments>
  ffi::Error operator()(PlatformValue platform, Arguments... arguments) const {
    Rules rules(kName);
    const std::optional<Problem> problem = Decode(rules, arguments...);
    if (!problem) return rules.error();
    if (problem->m == 0 || problem->n == 0 || problem->batch.count == 0) return ffi::Error::Success();
    if (Status status = kDo(MakeExecutor(platform), *problem); !status.ok()) return ToError(kName, status);
    return ffi::Error::Success();
  }
};

// a, b, a_scale_inv, b_scale_inv, bias, accumulator -> d, preactivation, workspace
template <ffi::ExecutionStage kStage>
auto Binding() {
  return Buffers<6, 3, kStage>()
      .template Attr<int64_t>("a_outer_ndim")
      .template Attr<int64_t>("b_outer_ndim")
      .template Attr<bool>("a_summed_first")
      .template Attr<bool>("b_summed_first")
      .template Attr<std::string_view>("scaling")
      .template Attr<bool>("gelu")
      .template Attr<bool>("accumulate")
      .template Attr<bool>("fast_accumulation")
      .template Attr<std::string_view>("algorithm");
}

// The operands of one GEMM of a sum: matrices a [m, k] and b [n, k] with scales of blocks.
struct PairBuffers {
  AnyBuffer a, b, a_scales, b_scales;
};

// The problem with the operands of a pair, as its own where it has none yet.
std::optional<OperandPair> DecodePair(Rules& rules, const PairBuffers& pair, const AnyBuffer& d, bool is_first,
                                      Problem& problem) {
  const Type a_type = problem.a.type, b_type = problem.b.type;
  DecodeKind(rules, {"a", pair.a}, {"b", pair.b}, {"d", d}, "block", "te_jax", problem);
  const auto left = DecodeGroups(rules, "a", pair.a, 0, 1, 1, false);
  const auto right = DecodeGroups(rules, "b", pair.b, 0, 1, 1, false);
  if (rules.broken()) return std::nullopt;
  if (is_first) problem.m = left->outer, problem.n = right->outer;
  problem.k = left->summed;
  rules.That(is_first || (problem.a.type == a_type && left->outer == problem.m), "a", pair.a,
             "have the type and the rows of the first pair's");
  rules.That(is_first || (problem.b.type == b_type && right->outer == problem.n), "b", pair.b,
             "have the type and the rows of the first pair's");
  rules.That(right->summed == problem.k && problem.k > 0, "b", pair.b,
             "sum over as many values as a does, one or more");
  const int64_t a_count = ScaleCount(problem, problem.m, false), b_count = ScaleCount(problem, problem.n, true);
  rules.Type(ffi::F32, "a_scale_inv", pair.a_scales).Elements(a_count, "a_scale_inv", pair.a_scales);
  rules.Type(ffi::F32, "b_scale_inv", pair.b_scales).Elements(b_count, "b_scale_inv", pair.b_scales);
  if (rules.broken()) return std::nullopt;
  return OperandPair{{pair.a.untyped_data(), Present<const float>(pair.a_scales), problem.a.type, false},
                     {pair.b.untyped_data(), Present<const float>(pair.b_scales), problem.b.type, false},
                     problem.k};
}

ffi::Error HandleSum(PlatformValue platform, AnyBuffer a, AnyBuffer b, AnyBuffer a_scales, AnyBuffer b_scales,
                     AnyBuffer second_a, AnyBuffer second_b, AnyBuffer second_a_scales, AnyBuffer second_b_scales,
                     AnyBuffer third_a, AnyBuffer third_b, AnyBuffer third_a_scales, AnyBuffer third_b_scales,
                     Result d) {
  Rules rules(kSumName);
  Problem problem{};
  std::optional<OperandPair> first = DecodePair(rules, {a, b, a_scales, b_scales}, *d, true, problem);
  std::vector<OperandPair> more;
  const auto add = [&](std::string_view name, const PairBuffers& pair) {
    rules.Of(name);
    if (const auto decoded = DecodePair(rules, pair, *d, false, problem)) more.push_back(*decoded);
  };
  if (first) add("second_", {second_a, second_b, second_a_scales, second_b_scales});
  if (!rules.broken() && CountOf(third_a) != 0) {
    add("third_", {third_a, third_b, third_a_scales, third_b_scales});
  }
  if (!rules.broken()) rules.Of("").Elements(CountOf({problem.m, problem.n}), "d", *d);
  if (rules.broken()) return rules.error();
  if (problem.m == 0 || problem.n == 0) return ffi::Error::Success();
  problem.a = first->a, problem.b = first->b, problem.k = first->k;
  problem.d = d->untyped_data();
  return ToError(kSumName, RunSum(MakeExecutor(platform), problem, more));
}

}  // namespace

// For each of up to three pairs, the last of which may be empty: a, b, a_scale_inv, b_scale_inv -> d
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_gemm_sum, HandleSum, (Buffers<12, 1>()), {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(te_gemm, Handle<Run>{}, Binding<ffi::ExecutionStage::kExecute>(),
                              {ffi::Traits::kCmdBufferCompatible});

#ifdef TE_JAX_CUDA
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_gemm_initialize, Handle<Prepare>{}, Binding<ffi::ExecutionStage::kInitialize>());
#endif

}  // namespace te::gemm
